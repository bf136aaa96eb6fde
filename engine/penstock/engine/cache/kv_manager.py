"""The KV cache as the scheduler sees it: look up, allocate, commit, free.

The scheduler asks in tokens and passes block ids on to the plan; it never reads or keeps them.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import msgspec

from penstock.engine.cache.block_pool import BlockPool
from penstock.engine.cache.events import BlockEvents
from penstock.engine.cache.full_attention import FullAttentionManager


class CachedSequence(Protocol):
    """What the cache must know of a request."""

    @property
    def index(self) -> int:
        """Its name."""
        ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hashes of its full blocks."""
        ...


class CacheHit(msgspec.Struct, frozen=True):
    """The longest usable prefix of a request."""

    num_tokens: int
    blocks: list[list[int]]
    """Per group. Nobody holds them for this request yet: good until the next allocation."""


class KVCacheManager:
    """Block tables of all requests over one pool.

    There is one group today, of full attention; every verb is keyed by group nonetheless.

    Args:
        num_blocks: All blocks, the null block included.
        block_size: Tokens in a block.
        enable_prefix_caching: Off: nothing is looked up or published.
        watermark: Share of the blocks that an admission leaves free while others run.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool, watermark: float) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.events = BlockEvents()
        self.pool = BlockPool(num_blocks, 1, self.events)
        self._groups = [FullAttentionManager(self.pool, 0, block_size)]
        self._watermark = math.ceil(watermark * num_blocks)

    @property
    def num_groups(self) -> int:
        """KV groups."""
        return len(self._groups)

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self.pool.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, those with evictable content included."""
        return self.pool.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1; cached but free blocks count as free."""
        return self.pool.num_used / self.num_blocks

    def cached_hashes(self) -> Sequence[bytes]:
        """Hashes of all blocks that a look-up finds now."""
        return self.pool.cached_hashes()

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks, over all groups, that hold this many tokens."""
        return -(-num_tokens // self.block_size) * len(self._groups)

    def lookup(self, request: CachedSequence, num_tokens: int) -> CacheHit:
        """The longest cached prefix that all groups hold of `num_tokens` tokens. Never all of them: the last one must run to
        give logits."""
        if not self.enable_prefix_caching:
            return CacheHit(0, [[] for _ in self._groups])
        hashes = request.block_hashes[: (num_tokens - 1) // self.block_size]
        found = [group.lookup(hashes) for group in self._groups]
        length = min(len(blocks) for blocks in found)
        return CacheHit(length * self.block_size, [blocks[:length] for blocks in found])

    def can_admit(self, num_tokens: int, hit: CacheHit, *, reserved: int, alone: bool) -> bool:
        """Whether all tokens of a waiting request fit, beside what running ones are still owed.

        Args:
            num_tokens: Tokens known of the request, which holds nothing yet.
            hit: Its cached prefix. Blocks of it that nobody holds use up free blocks like new ones.
            reserved: Blocks that running requests still need for tokens they already have.
            alone: Nothing else runs, so there is nobody to keep the watermark for.
        """
        held = sum(len(blocks) - self.pool.num_free_among(blocks) for blocks in hit.blocks)
        needed = self.blocks_for(num_tokens) - held + reserved
        return needed + (0 if alone else self._watermark) <= self.pool.num_free

    def allocate(self, request: CachedSequence, num_tokens: int, hit: CacheHit | None = None) -> list[list[int]] | None:
        """Grows the request's tables to hold `num_tokens`.

        Args:
            request: Whose tables.
            num_tokens: Tokens that they must hold afterwards, cached ones included.
            hit: For a request that holds nothing yet, the cached prefix that it starts from.

        Returns:
            Per group the blocks appended, cached ones first; None, and nothing changed, where the pool has too few.
        """
        if hit is not None:
            return self._begin(request, num_tokens, hit)
        missing = [group.num_missing(request.index, num_tokens) for group in self._groups]
        if sum(missing) > self.pool.num_free:
            return None
        return [group.append(request.index, count) for group, count in zip(self._groups, missing, strict=True)]

    def _begin(self, request: CachedSequence, num_tokens: int, hit: CacheHit) -> list[list[int]] | None:
        new = self.blocks_for(num_tokens) - sum(len(blocks) for blocks in hit.blocks)
        # Cached blocks that nobody holds are free ones too, and taken first, so that a request never evicts its own hits.
        if new + sum(self.pool.num_free_among(blocks) for blocks in hit.blocks) > self.pool.num_free:
            return None
        for group, blocks in zip(self._groups, hit.blocks, strict=True):
            group.adopt(request.index, blocks)
        grown = self.allocate(request, num_tokens)
        assert grown is not None
        return [cached + appended for cached, appended in zip(hit.blocks, grown, strict=True)]

    def commit(self, request: CachedSequence, upto: int) -> None:
        """Publishes the request's full blocks below token `upto`: computed, retired and accepted."""
        if self.enable_prefix_caching:
            for group in self._groups:
                group.commit(request.index, request.block_hashes, upto // self.block_size)

    def tables(self, request: CachedSequence) -> list[Sequence[int]]:
        """Per group, the request's blocks in the order of its tokens."""
        return [group.table(request.index) for group in self._groups]

    def free(self, request: CachedSequence) -> None:
        """Gives back all that the request holds."""
        for group in self._groups:
            group.free(request.index)

    def reset(self) -> bool:
        """Forgets all cached blocks; False, and nothing done, while any request holds one."""
        return self.pool.reset()
