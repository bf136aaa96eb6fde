"""The blocks of KV cache: who holds them, which are free, and which can be found by the hash of their content.

A free block keeps its content and its hash until it is handed out again: the free list is at the same time the eviction queue
of the prefix cache, least recently used first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from penstock.engine.cache.events import BlockEvents

NULL_BLOCK = 0
"""Stands for "no block" in block tables; never handed out, never freed."""


class CacheListener(Protocol):
    """Hears which content can be found in the cache, and may keep copies of it."""

    @property
    def num_places(self) -> int:
        """Copies at most."""
        ...

    def names(self) -> Iterable[bytes]:
        """Return the names of the content that it has."""
        ...

    def published(self, group: int, block: int, block_hash: bytes, *, lasting: bool) -> None:
        """The block can be found by this name from now on; `lasting`: in another process the name stands for the same content."""
        ...

    def forgotten(self, block_hash: bytes) -> None:
        """This content must not be found any more, wherever a copy is."""
        ...

    def cleared(self) -> None:
        """Forget all content, wherever a copy is."""
        ...


class BlockPool:
    """Blocks 0 … `num_blocks` - 1, of which block 0 is the null block.

    Args:
        num_blocks: All blocks, the null block included.
        num_groups: KV groups: a hash names separate blocks in each.
        events: Receives the blocks stored and removed; group 0 speaks for all.
    """

    def __init__(self, num_blocks: int, num_groups: int, events: BlockEvents) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}; the null block and one more are the least")
        self.num_blocks = num_blocks
        # An ordered dictionary is a hash table over a doubly linked list, in C: head, tail and middle are all O(1).
        self.free_list = OrderedDict[int, None].fromkeys(range(1, num_blocks))
        """Free blocks, least recently used first."""
        self.ref_counts = [0] * num_blocks
        self._names: list[tuple[int, Sequence[bytes]] | None] = [None] * num_blocks
        # Several blocks may hold the same tokens, computed side by side; any of them is a hit.
        self._cached: list[dict[bytes, list[int]]] = [{} for _ in range(num_groups)]
        self._told: dict[bytes, int] = {}
        """Hashes that the outside knows, each with the number of blocks in group 0 that hold its tokens."""
        self._events = events
        self.listener: CacheListener | None = None

    @property
    def num_free(self) -> int:
        """Number of free blocks, cached or not."""
        return len(self.free_list)

    @property
    def num_used(self) -> int:
        """Number of blocks in use, without the null block."""
        return self.num_blocks - 1 - self.num_free

    def get_new_blocks(self, count: int) -> list[int]:
        """Takes `count` free blocks, least recently used first, and forgets what they cached.

        Raises:
            ValueError: There are not that many; nothing was taken.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks wanted, {self.num_free} free")
        take, names = self.free_list.popitem, self._names
        blocks = [take(last=False)[0] for _ in range(count)]
        for block in blocks:
            if names[block] is not None:
                self._evict(block)
            self.ref_counts[block] = 1
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """One more holder for each; free ones leave the eviction queue."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self.free_list[block]
            self.ref_counts[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One holder less for each; those without any join the eviction queue in this order, or its head where they hold
        nothing that a look-up could find."""
        for block in blocks:
            if self.ref_counts[block] < 1:
                raise ValueError(f"block {block} is freed and nobody holds it")
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free_list[block] = None
                self._reuse_first_if_empty(block)

    def lookup(self, group: int, block_hash: bytes) -> int | None:
        """A block with this content, or None."""
        blocks = self._cached[group].get(block_hash)
        return blocks[0] if blocks else None

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks are free: touching them uses up free blocks."""
        return sum(self.ref_counts[block] == 0 for block in blocks)

    def cache(self, group: int, block: int, hashes: Sequence[bytes], *, lasting: bool = True) -> None:
        """Publishes a full block, once.

        Args:
            group: Its group.
            block: It.
            hashes: Of its tokens, in their order: several where the block is larger than what a hash stands for. The last one,
                which stands for all tokens before its end, is the name that `lookup` finds.
            lasting: Whether the names stand for the same content in another process.
        """
        if self._names[block] is not None:
            raise ValueError(f"block {block} is cached already")
        self._names[block] = (group, hashes)
        self._cached[group].setdefault(hashes[-1], []).append(block)
        if self.listener is not None:
            self.listener.published(group, block, hashes[-1], lasting=lasting)
        if group == 0:
            for block_hash in hashes:
                if (count := self._told.get(block_hash, 0)) == 0:
                    self._events.stored(block_hash)
                self._told[block_hash] = count + 1

    def forget(self, block_hash: bytes) -> None:
        """Make this content unfindable in every group. Requests that hold its blocks keep them."""
        if self.listener is not None:
            self.listener.forgotten(block_hash)
        for cached in self._cached:
            self.clear(cached.get(block_hash, ())[:])

    def clear(self, blocks: Iterable[int]) -> None:
        """Make these blocks unfindable. Requests that hold them keep them."""
        for block in blocks:
            self._evict(block)
            if self.ref_counts[block] == 0:
                self._reuse_first_if_empty(block)

    def cached_hashes(self) -> Sequence[bytes]:
        """Hashes whose tokens group 0 holds now, as the events say."""
        return list(self._told)

    def reset(self) -> bool:
        """Forgets all content; False, and nothing done, while anybody holds a block."""
        if self.num_used:
            return False
        if self.listener is not None:
            self.listener.cleared()
        for cached in self._cached:
            cached.clear()
        self._told.clear()
        self._names = [None] * self.num_blocks
        self._events.cleared()
        return True

    def _reuse_first_if_empty(self, block: int) -> None:
        # The end of a prompt that fills no block, say: in the queue's middle it would hold a place that content could have.
        if self._names[block] is None:
            self.free_list.move_to_end(block, last=False)

    def _evict(self, block: int) -> None:
        name = self._names[block]
        if name is None:
            return
        group, hashes = name
        self._names[block] = None
        same = self._cached[group][hashes[-1]]
        same.remove(block)
        if not same:
            del self._cached[group][hashes[-1]]
        if group == 0:
            for block_hash in hashes:
                self._told[block_hash] -= 1
                if not self._told[block_hash]:
                    del self._told[block_hash]
                    self._events.removed(block_hash)
