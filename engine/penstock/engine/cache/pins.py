"""Prefixes that eviction spares: a pin holds its blocks as a request would."""

from collections.abc import Sequence

from penstock.engine.cache.block_pool import BlockPool


class Pins:
    """Named sets of held blocks.

    Args:
        pool: Of the blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: dict[str, list[int]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._blocks

    def num_blocks(self, more: Sequence[int] = ()) -> int:
        """Blocks held, each counted once however many pins hold it; with `more` beside them."""
        return len(set(more).union(*self._blocks.values()))

    def pin(self, name: str, blocks: Sequence[int]) -> None:
        """Holds blocks, in the order of their tokens; `ValueError` where the name is taken."""
        if name in self._blocks:
            raise ValueError(f"there is a pin {name!r} already")
        self._pool.touch(blocks)
        self._blocks[name] = list(blocks)

    def unpin(self, name: str) -> None:
        """Lets them go: they join the eviction queue; `ValueError` where there is no such pin."""
        if name not in self._blocks:
            raise ValueError(f"there is no pin {name!r}")
        self._pool.free(reversed(self._blocks.pop(name)))

    def clear(self) -> None:
        """Lets all go."""
        for name in list(self._blocks):
            self.unpin(name)
