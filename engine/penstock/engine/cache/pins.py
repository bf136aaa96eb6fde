"""Blocks that are held for other reasons than requests: pinned prefixes, and pages that are being copied."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.engine.cache.block_pool import BlockPool


class Owner(NamedTuple):
    """Owner of pinned blocks."""

    kind: str
    """What they are held for."""
    name: str | int
    """One of that kind."""


class Pins:
    """A pin is a reference like that of a request: the pool hands out no pinned block.

    Args:
        pool: Of the blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: dict[Owner, dict[int, None]] = {}

    def pin(self, blocks: Sequence[int], owner: Owner) -> None:
        """Holds blocks, in the order of their tokens; `ValueError`, and nothing changed, where the owner holds one already."""
        held = self._blocks.get(owner, {})
        if len(added := dict.fromkeys(blocks)) < len(blocks) or not held.keys().isdisjoint(added):
            raise ValueError(f"{owner} pins a block twice: {list(blocks)}")
        self._pool.touch(blocks)
        self._blocks[owner] = held | added

    def unpin(self, blocks: Iterable[int], owner: Owner) -> None:
        """Lets blocks go, the last first, so that those of a prefix's beginning are evicted last; `ValueError`, and nothing
        changed, where the owner does not hold them all."""
        held, leaving = self._blocks.get(owner, {}), list(blocks)
        if len(kept := {block: None for block in held if block not in set(leaving)}) + len(leaving) != len(held):
            raise ValueError(f"{owner} unpins blocks that it does not hold: {leaving}")
        self._pool.free(reversed(leaving))
        if kept:
            self._blocks[owner] = kept
        else:
            self._blocks.pop(owner, None)

    def blocks(self, owner: Owner) -> list[int]:
        """What the owner holds, in the order in which it came."""
        return list(self._blocks.get(owner, ()))

    def owners(self, kind: str) -> list[Owner]:
        """Return the owners of that kind that hold any block."""
        return [owner for owner in self._blocks if owner.kind == kind]

    def num_blocks(self, kind: str, more: Iterable[int] = ()) -> int:
        """Blocks held for this, each counted once however many owners hold it; with `more` beside them."""
        return len(set(more).union(*(self._blocks[owner] for owner in self.owners(kind))))
