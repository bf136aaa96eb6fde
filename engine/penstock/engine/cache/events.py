"""What the block pool has to say to the outside: which blocks can be reused now."""

from penstock.api.events import AllBlocksCleared, BlockRemoved, BlockStored, Medium

BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared


class BlockEvents:
    """Collects block events in their order; neighbours of one kind become one event.

    The pool stores a block only when its tokens are retired and accepted, so that nothing here is ever taken back.
    """

    def __init__(self) -> None:
        self._events: list[BlockEvent] = []

    def has(self, medium: Medium) -> None:
        """There is this medium."""
        self._events.append(BlockStored([], medium))

    def stored(self, block_hash: bytes, medium: Medium | None = None) -> None:
        """A full block became reusable."""
        if self._events and isinstance(last := self._events[-1], BlockStored) and last.medium == medium:
            last.block_hashes.append(block_hash)
        else:
            self._events.append(BlockStored([block_hash], medium))

    def removed(self, block_hash: bytes, medium: Medium | None = None) -> None:
        """The last block of this hash was evicted."""
        if self._events and isinstance(last := self._events[-1], BlockRemoved) and last.medium == medium:
            last.block_hashes.append(block_hash)
        else:
            self._events.append(BlockRemoved([block_hash], medium))

    def cleared(self) -> None:
        """Record that everything was forgotten. Earlier events that were not taken no longer matter."""
        self._events = [AllBlocksCleared()]

    def take(self) -> list[BlockEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events
