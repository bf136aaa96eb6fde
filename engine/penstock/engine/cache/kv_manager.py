"""The KV cache as the scheduler and connectors see it: look up, allocate, commit, invalidate, pin, free.

The scheduler asks in tokens and passes block ids on to the plan; it never reads or keeps them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol

import msgspec

from penstock.engine.cache.block_pool import NULL_BLOCK, BlockPool, CacheListener
from penstock.engine.cache.events import BlockEvents
from penstock.engine.cache.full_attention import FullAttentionManager
from penstock.engine.cache.group_manager import GroupManager
from penstock.engine.cache.layout import KVGroup, longest_sequence, max_blocks
from penstock.engine.cache.pins import Owner, Pins
from penstock.engine.cache.sliding_window import SlidingWindowManager

_PREFIX = "prefix"
"""The kind of pins that clients ask for."""


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
    """Blocks of each group. They are not held for this request yet, so the result is valid until the next allocation."""


class Prefix(msgspec.Struct, frozen=True):
    """Full blocks by name, of no request."""

    block_hashes: list[bytes]
    index: int = -1


class KVCacheManager:
    """Block tables of all requests over one pool.

    Args:
        num_blocks: All blocks, the null block included.
        groups: The layers' kinds; each has block tables of its own.
        enable_prefix_caching: Off: nothing is looked up or published.
        watermark: Share of the blocks that an admission leaves free while others run.
        max_in_flight: Tokens of one request at most that are planned and not yet retired.
    """

    def __init__(
        self, num_blocks: int, groups: Sequence[KVGroup], *, enable_prefix_caching: bool, watermark: float, max_in_flight: int
    ) -> None:
        self.block_sizes = [group.block_size for group in groups]
        self.block_size = min(self.block_sizes)
        """Tokens that a hash stands for: a block, or a part of one."""
        self.enable_prefix_caching = enable_prefix_caching
        self.needs_commits = enable_prefix_caching or any(group.window is not None for group in groups)
        """Whether `commit` does anything."""
        self.events = BlockEvents()
        self.pool = BlockPool(num_blocks, len(groups), self.events)
        self._pins = Pins(self.pool)
        self._specs = tuple(groups)
        self._groups: list[GroupManager] = [
            (FullAttentionManager if group.window is None else SlidingWindowManager)(self.pool, number, group, self.block_size)
            for number, group in enumerate(groups)
        ]
        self._hit_size = math.lcm(*self.block_sizes)
        self._watermark = math.ceil(watermark * num_blocks)
        self._max_in_flight = max_in_flight

    def listen(self, listener: CacheListener) -> None:
        """Set the listener that hears which content can be found. There may be one."""
        self.pool.listener = listener

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
        """Number of free blocks, those with evictable content included."""
        return self.pool.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1; cached but free blocks count as free."""
        return self.pool.num_used / self.num_blocks

    def cached_hashes(self) -> Sequence[bytes]:
        """Hashes of all tokens that are cached now, as the events say."""
        return self.pool.cached_hashes()

    @property
    def num_places(self) -> int:
        """Names at most that can be found at a time, in blocks or in copies elsewhere."""
        return self.num_blocks + (self.pool.listener.num_places if self.pool.listener is not None else 0)

    def names(self) -> set[bytes]:
        """Return the names of all content that can be found, in blocks or in copies elsewhere."""
        return {*self.pool.cached_hashes(), *(self.pool.listener.names() if self.pool.listener is not None else ())}

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks, over all groups, that a sequence holds at most on its way to this many tokens."""
        return max_blocks(self._specs, num_tokens, self._max_in_flight)

    def longest(self, limit: int) -> int:
        """The longest sequence, up to `limit` tokens, that fits while nothing else is there."""
        return longest_sequence(self._specs, self.num_blocks, self._max_in_flight, limit)

    def lookup(self, request: CachedSequence, num_tokens: int) -> CacheHit:
        """The longest cached prefix of `num_tokens` tokens that all groups can use. Never all of them: the last one must run to
        give logits."""
        found: list[list[int]] = [[] for _ in self._groups]
        if not self.enable_prefix_caching:
            return CacheHit(0, found)
        length = self._whole(min(num_tokens - 1, len(request.block_hashes) * self.block_size))
        # Each group can only shorten the prefix, and one that agrees with its length may not with a shorter one: round and
        # round until all have agreed in a row.
        number = agreed = 0
        while agreed < len(self._groups):
            group = self._groups[number]
            found[number] = group.lookup(request.block_hashes, length)
            usable = len(found[number]) * group.block_size
            if usable < length:
                length = self._whole(usable)
                agreed = int(length == usable)
            else:
                agreed += 1
            number = (number + 1) % len(self._groups)
        return CacheHit(length, found)

    def elsewhere(
        self, request: CachedSequence, num_tokens: int, local: CacheHit, has: Callable[[int, bytes], bool]
    ) -> tuple[int, list[tuple[int, int, bytes]]]:
        """Return the longest prefix that content elsewhere can complete.

        Args:
            request: Holds nothing yet.
            num_tokens: Its tokens, of which the last must run.
            local: Its cached prefix.
            has: Returns whether a group's block is available elsewhere, by name.

        Returns:
            Its tokens, and what must be loaded: (group, place in its table, name) of each block.
        """
        length = self._whole(min(num_tokens - 1, len(request.block_hashes) * self.block_size))
        before = -1
        while before != length > local.num_tokens:
            before = length
            for group, blocks in zip(self._groups, local.blocks, strict=True):
                length = self._whole(group.extend(request.block_hashes, len(blocks), length, has))
        if length <= local.num_tokens:
            return local.num_tokens, []
        return length, [
            (number, at, block_hash)
            for number, (group, blocks) in enumerate(zip(self._groups, local.blocks, strict=True))
            for at, block_hash in group.missing(request.block_hashes, len(blocks), length)
        ]

    def _whole(self, num_tokens: int) -> int:
        """Rounded down to where blocks of all groups end."""
        return max(num_tokens, 0) // self._hit_size * self._hit_size

    def can_admit(self, num_tokens: int, hit: CacheHit, *, reserved: int, alone: bool) -> bool:
        """Return whether all tokens of a waiting request fit, after the tokens that running requests still need.

        Args:
            num_tokens: Tokens known of the request, which holds nothing yet.
            hit: Its cached prefix. Free blocks of it are used up like new ones.
            reserved: Blocks that running requests still need for tokens they already have.
            alone: Nothing else runs, so the watermark is not needed.
        """
        needed = reserved
        for group, blocks in zip(self._specs, hit.blocks, strict=True):
            new = -(-num_tokens // group.block_size) - len(blocks)
            needed += min(new + self._num_free_among(blocks), group.max_blocks(num_tokens, self._max_in_flight))
        return needed + (0 if alone else self._watermark) <= self.pool.num_free

    def _num_free_among(self, blocks: Sequence[int]) -> int:
        return self.pool.num_free_among(block for block in blocks if block != NULL_BLOCK)

    def allocate(
        self,
        request: CachedSequence,
        num_tokens: int,
        *,
        lookahead: int = 0,
        local: CacheHit | None = None,
        external: int = 0,
    ) -> list[list[int]] | None:
        """Grows the request's tables to hold `num_tokens`.

        Args:
            request: Whose tables.
            num_tokens: Tokens that they must hold afterwards, cached ones included.
            lookahead: Drafts after them, which may be rejected.
            local: For a request that holds nothing yet, the cached prefix that it starts from.
            external: Tokens after that prefix whose KV comes from elsewhere into the blocks given here; whole blocks of all
                groups. `commit` them once they are there.

        Returns:
            Per group the blocks appended, cached ones first and the null block for those that no token will see; None, and
            nothing changed, where the pool has too few.
        """
        if local is not None:
            return self._begin(request, num_tokens + lookahead, local, external)
        if external:
            raise ValueError("external tokens follow a cached prefix: a request that has begun computes its own")
        grown = self.grow([request], [num_tokens + lookahead])
        return None if grown is None else grown[0]

    def grow(self, requests: Sequence[CachedSequence], num_tokens: Sequence[int]) -> list[list[list[int]]] | None:
        """Grows the tables of requests that have begun, each to hold so many tokens.

        Returns:
            Per request and group the blocks appended; None, and nothing changed, where the pool has too few for all of them.
        """
        indexes = [request.index for request in requests]
        missing = [group.num_missing(indexes, num_tokens) for group in self._groups]
        needed = sum(map(sum, missing))
        if needed > self.pool.num_free:
            return None
        blocks = iter(self.pool.get_new_blocks(needed))
        grown = [[list(islice(blocks, count)) for count in counts] for counts in zip(*missing, strict=True)]
        for group, appended in zip(self._groups, zip(*grown, strict=True), strict=True):
            group.append(indexes, appended)
        return grown

    def _begin(self, request: CachedSequence, num_tokens: int, local: CacheHit, external: int) -> list[list[int]] | None:
        begun = local.num_tokens + external
        if external < 0 or external % self._hit_size or begun > num_tokens:
            raise ValueError(f"{external} external tokens are not whole blocks of {self._hit_size}, or more than {num_tokens}")
        # What windows have left behind when the request begins need not come from elsewhere.
        firsts = [
            blocks + [NULL_BLOCK] * (group.num_unseen(begun) - len(blocks))
            for group, blocks in zip(self._groups, local.blocks, strict=True)
        ]
        new = sum(-(-num_tokens // group.block_size) - len(first) for group, first in zip(self._groups, firsts, strict=True))
        # Cached blocks that nobody holds are free ones too, and taken first, so that a request never evicts its own hits.
        if new + sum(self._num_free_among(first) for first in firsts) > self.pool.num_free:
            return None
        for group, first in zip(self._groups, firsts, strict=True):
            group.adopt(request.index, first)
        grown = self.allocate(request, num_tokens)
        assert grown is not None
        return [first + appended for first, appended in zip(firsts, grown, strict=True)]

    def commit(self, request: CachedSequence, upto: int, *, lasting: bool = True) -> None:
        """The request's tokens below `upto` are computed, retired and accepted: full blocks of them are published, and those
        that no later token sees are given back. `lasting`: the blocks' names stand for the same content in another process."""
        for group in self._groups:
            if self.enable_prefix_caching:
                group.publish(request.index, request.block_hashes, upto, lasting=lasting)
            group.retire(request.index, upto)

    def num_published(self, request: CachedSequence) -> int:
        """How many of the request's `block_hashes`, from the first one on, were published or found already."""
        return self._groups[0].num_published(request.index)

    def tables(self, request: CachedSequence) -> list[Sequence[int]]:
        """Per group, the request's blocks in the order of its tokens."""
        return [group.table(request.index) for group in self._groups]

    def holds(self, request: CachedSequence) -> bool:
        """Whether the request has block tables."""
        return self._groups[0].has(request.index)

    def free(self, request: CachedSequence) -> None:
        """Gives back all that the request holds."""
        for group in self._groups:
            group.free(request.index)

    def forget(self, block_hashes: Iterable[bytes]) -> None:
        """Make this content unfindable, whatever blocks hold it. Requests that hold them continue."""
        for block_hash in block_hashes:
            self.pool.forget(block_hash)

    def invalidate(self, blocks: Iterable[int]) -> list[int]:
        """Make the content of these wrong blocks unfindable, and return the requests that hold any of them, by their names in
        ascending
        order."""
        wrong = set(blocks) - {NULL_BLOCK}
        self.pool.clear(wrong)
        return sorted({request for group in self._groups for request in group.holders(wrong)})

    def pin(self, blocks: Sequence[int], owner: Owner) -> None:
        """Holds blocks for the owner; `ValueError`, and nothing changed, where it holds one of them already."""
        self._pins.pin(blocks, owner)

    def unpin(self, blocks: Iterable[int], owner: Owner) -> None:
        """Lets them go; `ValueError`, and nothing changed, where the owner does not hold them all."""
        self._pins.unpin(blocks, owner)

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks of pinned prefixes."""
        return self._pins.num_blocks(_PREFIX)

    def pin_prefix(self, name: str, prefix: Prefix, reserved: int) -> int:
        """Spares what is cached of a prefix from eviction until it is unpinned; returns its tokens.

        Args:
            name: Of the pin.
            prefix: Its full blocks.
            reserved: Blocks that no pin may take.

        Raises:
            ValueError: Nothing of it is cached, the name is taken, or too few blocks would be left; nothing has changed.
        """
        if self._pins.blocks(owner := Owner(_PREFIX, name)):
            raise ValueError(f"there is a pin {name!r} already")
        hit = self.lookup(prefix, len(prefix.block_hashes) * self.block_size + 1)
        if not hit.num_tokens:
            raise ValueError("no block of this prefix is cached: send it first")
        blocks = [block for group in hit.blocks for block in group if block != NULL_BLOCK]
        pinned = self._pins.num_blocks(_PREFIX, blocks)
        if self.num_blocks - pinned < reserved:
            raise ValueError(
                f"of {self.num_blocks} blocks {pinned} would be pinned, and a sequence of full length needs {reserved} others"
            )
        self.pin(blocks, owner)
        return hit.num_tokens

    def unpin_prefix(self, name: str) -> None:
        """Lets the prefix go: its blocks join the eviction queue; `ValueError` where there is no such pin."""
        if not (blocks := self._pins.blocks(owner := Owner(_PREFIX, name))):
            raise ValueError(f"there is no pin {name!r}")
        self.unpin(blocks, owner)

    def unpin_prefixes(self) -> None:
        """Lets all prefixes go."""
        for owner in self._pins.owners(_PREFIX):
            self.unpin(self._pins.blocks(owner), owner)

    def reset(self) -> bool:
        """Forgets all cached blocks; False, and nothing done, while anybody holds one."""
        return self.pool.reset()
