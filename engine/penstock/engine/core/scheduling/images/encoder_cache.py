"""The images whose embeddings the runner holds. The scheduler decides, and each plan tells the runner what to make and what to
drop.

An entry is held by the requests that still need it. An entry without holders stays until its room is needed; the one that was
released first leaves first.
"""

from collections import OrderedDict
from collections.abc import Iterable


class EncoderCache:
    """Sizes are counted in embeddings.

    Args:
        size: Embeddings that fit.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._lengths: dict[str, int] = {}
        self._holders: dict[str, set[int]] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._used = self._held = 0
        self._evicted: list[str] = []

    def __contains__(self, identifier: str) -> bool:
        """Whether the runner has it, or will have it when the plans made so far have run."""
        return identifier in self._lengths

    @property
    def used(self) -> int:
        """Embeddings that the runner has."""
        return self._used

    @property
    def held(self) -> int:
        """Embeddings in entries that some request needs."""
        return self._held

    def room(self, kept: Iterable[str]) -> int:
        """Return the embeddings for which there would be room without the idle entries other than `kept`."""
        return self.size - self._held - sum(self._lengths[name] for name in set(kept) if name in self._idle)

    def hold(self, identifier: str, request: int) -> bool:
        """A request needs an entry that is there; whether it did not hold it before."""
        if identifier in self._idle:
            del self._idle[identifier]
            self._held += self._lengths[identifier]
        is_new = request not in self._holders[identifier]
        self._holders[identifier].add(request)
        return is_new

    def add(self, identifier: str, length: int, request: int) -> None:
        """Make an entry that a request needs, and evict idle entries for it. There must be room."""
        while self._used + length > self.size:
            oldest, _ = self._idle.popitem(last=False)
            self._drop(oldest)
        self._lengths[identifier], self._holders[identifier] = length, {request}
        self._used += length
        self._held += length

    def release(self, identifier: str, request: int) -> None:
        """A request does not need an entry any more; of no effect where it did not hold it."""
        holders = self._holders.get(identifier)
        if holders is None or request not in holders:
            return
        holders.remove(request)
        if not holders:
            self._held -= self._lengths[identifier]
            self._idle[identifier] = None

    def forget(self, identifiers: Iterable[str]) -> None:
        """Forget these entries: the runner may not have them, or has wrong ones. Requests that need one have it made again."""
        for identifier in identifiers:
            if identifier not in self._lengths:
                continue
            if identifier in self._idle:
                del self._idle[identifier]
            else:
                self._held -= self._lengths[identifier]
            self._drop(identifier)

    def clear(self) -> None:
        """Forgets all."""
        self.forget(list(self._lengths))

    def take_evicted(self) -> list[str]:
        """Entries that the runner is to drop, since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def _drop(self, identifier: str) -> None:
        self._used -= self._lengths.pop(identifier)
        del self._holders[identifier]
        self._evicted.append(identifier)
