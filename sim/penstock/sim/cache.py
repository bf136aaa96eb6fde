"""The KV blocks of a simulated replica: a prefix cache with LRU eviction, by counts and names instead of memory."""

from collections.abc import Sequence


class KVPool:
    """KV blocks: those that requests hold, and idle ones whose content can still be found.

    Args:
        capacity: Blocks.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._holders: dict[bytes, int] = {}
        self._idle: dict[bytes, None] = {}
        """Idle named blocks, least recently used first."""
        self._private = 0
        self.stored: list[bytes] = []
        """Names published since these were last taken."""
        self.removed: list[bytes] = []

    @property
    def used(self) -> int:
        """Blocks that requests hold."""
        return self._private + len(self._holders)

    @property
    def free(self) -> int:
        """Blocks that can be had, those with content that would be evicted included."""
        return self.capacity - self.used

    def has(self, block: bytes) -> bool:
        """Whether this block is cached."""
        return block in self._holders or block in self._idle

    def depth(self, blocks: Sequence[bytes]) -> int:
        """Leading blocks that are cached."""
        for at, block in enumerate(blocks):
            if not self.has(block):
                return at
        return len(blocks)

    def idle_among(self, blocks: Sequence[bytes]) -> int:
        """Return how many of these cached blocks are idle, and so use up free ones."""
        return sum(block in self._idle for block in blocks)

    def adopt(self, blocks: Sequence[bytes]) -> None:
        """A request holds these cached blocks too."""
        for block in blocks:
            self._idle.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1

    def take(self, count: int) -> bool:
        """Holds `count` nameless blocks; False, and nothing changed, where there are too few."""
        if count > self.free:
            return False
        self._private += count
        excess = self.used + len(self._idle) - self.capacity
        while excess > 0:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            self.removed.append(oldest)
            excess -= 1
        return True

    def publish(self, block: bytes) -> None:
        """A nameless block that a request holds has got its content. Where another has that name already, it takes its place."""
        self._private -= 1
        if block in self._holders or block in self._idle:
            self.adopt([block])
        else:
            self._holders[block] = 1
            self.stored.append(block)

    def release(self, named: Sequence[bytes], nameless: int) -> None:
        """A request ends. Its last blocks are the first to be evicted."""
        self._private -= nameless
        for block in reversed(named):
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                self._idle[block] = None
