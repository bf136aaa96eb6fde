"""Which replica caches which block: one dict from block hash to a bitmask of replicas, fed by KV events or by routing history.

A block's hash holds its whole prefix, so the longest cached prefix of a prompt, for all replicas at once, is a walk along its
hashes that keeps the bits which no block has cleared yet.

Memory is bounded twice, by replica and in all; what has been used least recently goes first. An engine evicts before it fills its
own memory, so the bounds matter where removals were lost, where an engine claims more than can be true, and where nothing but
routing history says what it holds.

Emptying a replica costs nothing at once: it gets a new bit, and the blocks under the old one, which no walk sees any more, are
swept later in small portions.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.figures import FEW, Floats

MAX_BLOCKS_PER_REPLICA = 262_144
"""4 M tokens in blocks of 16: more than a replica of eight H200 caches of an 8B model."""
MAX_BLOCKS = 4_194_304
"""Most entries of all replicas together; a block counts once for each replica that caches it. About 0.8 GB."""
SWEPT_AT_ONCE = 1024
"""Blocks of an emptied replica that are swept at a time, in about 0.2 ms."""
BATCHES = 64
"""A replica at its bound evicts this fraction of its blocks at once."""
_NEARLY = 0.9
"""Share of a bound from which on the order of use is kept up to date: below, nothing will be dropped."""


class Knowledge(enum.Enum):
    """How much is known of what a replica caches."""

    EXACT = "exact"
    """All, from its events."""
    PARTIAL = "partial"
    """What it has stored since events were lost that nothing could replay."""
    PREDICTED = "predicted"
    """What requests sent there must have left, as it tells nothing itself."""
    UNKNOWN = "unknown"
    """No event has come yet."""


class _Holder:
    """One replica's blocks under one bit."""

    __slots__ = ("bit", "blocks", "key", "limit", "mask")

    def __init__(self, key: ReplicaKey, bit: int, limit: int) -> None:
        self.key = key
        self.bit = bit
        self.mask = 1 << bit
        self.limit = limit
        self.blocks: dict[bytes, None] = {}
        """Blocks in the order of their last use."""


class ResidencyIndex:
    """Residency of KV blocks. What it says is a hint: a wrong entry costs a prefill, never a request.

    Args:
        per_replica: Blocks known of one replica, at most.
        total: Blocks known of all replicas, at most; a block counts at each.
    """

    def __init__(self, per_replica: int = MAX_BLOCKS_PER_REPLICA, total: int = MAX_BLOCKS) -> None:
        self._per_replica, self._total = per_replica, total
        self._bits: dict[bytes, int] = {}
        self._holders: dict[ReplicaKey, _Holder] = {}
        self._by_bit: list[_Holder | None] = []
        self._free: list[int] = []
        self._live = 0
        """The bits of `_holders`."""
        self._dead: list[_Holder] = []
        self._knowledge: dict[ReplicaKey, Knowledge] = {}
        self.entries = 0
        """Blocks of all replicas, a block counted at each."""
        self.dropped = 0
        """Blocks that the bounds have cost."""
        self.version = 0
        """Rises when a bit gets or loses its replica."""

    def __len__(self) -> int:
        """Different blocks, those still to be swept included."""
        return len(self._bits)

    def blocks(self, key: ReplicaKey) -> int:
        """How many blocks `key` is known to cache."""
        holder = self._holders.get(key)
        return len(holder.blocks) if holder else 0

    def holds(self, key: ReplicaKey, block: bytes) -> bool:
        """Return whether `key` is known to cache the block."""
        holder = self._holders.get(key)
        return holder is not None and block in holder.blocks

    def knowledge(self, key: ReplicaKey) -> Knowledge:
        """How much is known of `key`."""
        return self._knowledge.get(key, Knowledge.UNKNOWN)

    def set_knowledge(self, key: ReplicaKey, knowledge: Knowledge) -> None:
        """Says how much is known of `key` from now on."""
        self._knowledge[key] = knowledge

    def set_limit(self, key: ReplicaKey, blocks: int) -> None:
        """Set the size of `key`, in blocks. The bound for any replica applies too."""
        holder = self._holder(key)
        holder.limit = max(1, min(blocks, self._per_replica))
        self._enforce(holder)

    def set_total(self, blocks: int) -> None:
        """Set how many blocks of all replicas are kept at most."""
        self._total = max(1, blocks)
        self._enforce_total()

    def limit(self, key: ReplicaKey) -> int:
        """How many blocks of `key` are kept at most."""
        holder = self._holders.get(key)
        return holder.limit if holder else self._per_replica

    def store(self, key: ReplicaKey, hashes: Iterable[bytes]) -> None:
        """`key` caches these blocks now; those it cached already have been used."""
        holder = self._holder(key)
        bits, own, mask = self._bits, holder.blocks, holder.mask
        before = len(own)
        for block in hashes:
            if block in own:
                del own[block]
            else:
                others = bits.get(block)
                # Most blocks are cached once: they share one mask object.
                bits[block] = mask if others is None else others | mask
            own[block] = None
        self.entries += len(own) - before
        if self._dead:
            self.sweep(SWEPT_AT_ONCE)
        if len(own) > holder.limit or self.entries > self._total:
            self._enforce(holder)

    def used(self, key: ReplicaKey, hashes: Sequence[bytes]) -> None:
        """A request that begins with these blocks runs at `key`: those that are known there are the last to be dropped."""
        holder = self._holders.get(key)
        if holder is None:
            return
        own = holder.blocks
        if len(own) < _NEARLY * holder.limit and self.entries < _NEARLY * self._total:
            return
        for block in hashes:
            if block in own:
                del own[block]
                own[block] = None

    def remove(self, key: ReplicaKey, hashes: Iterable[bytes]) -> None:
        """`key` caches these blocks no more; unknown ones are ignored."""
        holder = self._holders.get(key)
        if holder is None:
            return
        own = holder.blocks
        for block in hashes:
            if block in own:
                del own[block]
                self.entries -= 1
                self._clear_bit(block, holder.mask)

    def clear(self, key: ReplicaKey) -> None:
        """`key` caches nothing that is known."""
        holder = self._holders.get(key)
        if holder is None or not holder.blocks:
            return
        self._retire(holder)
        self._holders[key] = self._open(key, holder.limit)

    def drop(self, key: ReplicaKey) -> None:
        """`key` is gone."""
        self._knowledge.pop(key, None)
        holder = self._holders.pop(key, None)
        if holder is not None:
            self._retire(holder)

    def sweep(self, limit: int) -> int:
        """Forgets up to `limit` blocks that emptied replicas have left; returns how many are still to go."""
        while self._dead and limit > 0:
            holder = self._dead[-1]
            for _ in range(min(limit, len(holder.blocks))):
                self._clear_bit(holder.blocks.popitem()[0], holder.mask)
                limit -= 1
            if not holder.blocks:
                self._dead.pop()
                self._free.append(holder.bit)
        return sum(len(holder.blocks) for holder in self._dead)

    def longest_prefix(self, hashes: Sequence[bytes]) -> dict[ReplicaKey, int]:
        """Leading blocks of `hashes` that each replica caches; replicas with none are left out."""
        depths: dict[ReplicaKey, int] = {}
        for bits, depth in self.spans(hashes):
            while bits:
                lowest = bits & -bits
                holder = self._by_bit[lowest.bit_length() - 1]
                if holder is not None:
                    depths[holder.key] = depth
                bits ^= lowest
        return depths

    def spans(self, hashes: Sequence[bytes]) -> list[tuple[int, int]]:
        """The same as (replicas by their bits, blocks): each replica that caches any is in one of them. `rows_by_bit` says which
        bit is whose."""
        spans: list[tuple[int, int]] = []
        alive, depth = self._live, 0
        # All look-ups at once: half the time of a loop of them, and a prompt is seldom known to a small part only.
        for block_bits in map(self._bits.get, hashes):
            if block_bits is None:
                break
            still = alive & block_bits
            if still != alive:
                if depth:
                    spans.append((alive & ~still, depth))
                alive = still
                if not alive:
                    return spans
            depth += 1
        if depth:
            spans.append((alive, depth))
        return spans

    def add_tokens(self, hashes: Sequence[bytes], most: int, block_size: int, rows: NDArray[np.intp], tokens: Floats) -> None:
        """Adds to `tokens` what each replica's cache would supply of a prompt: whole blocks, `most` of them at most.

        Args:
            hashes: Those of the prompt.
            most: Blocks that count at most.
            block_size: Tokens in a block.
            rows: intp [bits], from `rows_by_bit`.
            tokens: float64 [rows + 1]; the last is for replicas without a row.
        """
        spans = self.spans(hashes)
        if len(rows) > FEW and sum([bits.bit_count() for bits, _ in spans]) > FEW:
            span, bit = _ones([bits for bits, _ in spans], len(rows))
            supplied = np.array([float(min(depth, most) * block_size) for _, depth in spans])
            tokens[rows[bit]] += supplied[span]  # at once: no replica is in two spans
            return
        for bits, depth in spans:
            while bits:
                lowest = bits & -bits
                tokens[rows[lowest.bit_length() - 1]] += min(depth, most) * block_size
                bits ^= lowest

    def rows_by_bit(self, rows: Mapping[ReplicaKey, int]) -> list[int]:
        """Return, for every bit, the number that `rows` gives its replica, or -1. Valid while `version` stays the same."""
        return [rows.get(holder.key, -1) if holder is not None else -1 for holder in self._by_bit]

    def _holder(self, key: ReplicaKey) -> _Holder:
        holder = self._holders.get(key)
        if holder is None:
            holder = self._holders[key] = self._open(key, self._per_replica)
        return holder

    def _open(self, key: ReplicaKey, limit: int) -> _Holder:
        """A holder under a bit that no block has."""
        if self._free:
            bit = self._free.pop()
        else:
            bit = len(self._by_bit)
            self._by_bit.append(None)
        holder = self._by_bit[bit] = _Holder(key, bit, limit)
        self._live |= holder.mask
        self.version += 1
        return holder

    def _retire(self, holder: _Holder) -> None:
        """Retire the replica's bit: no walk sees it any more."""
        self._live &= ~holder.mask
        self._by_bit[holder.bit] = None
        self.version += 1
        self.entries -= len(holder.blocks)
        self._dead.append(holder)
        if len(holder.blocks) <= SWEPT_AT_ONCE:
            self.sweep(len(holder.blocks) + 1)

    def _enforce(self, holder: _Holder) -> None:
        """Drops what has been used least recently: at a replica above its bound, then at the one with most blocks."""
        while (excess := len(holder.blocks) - holder.limit) > 0:
            self._evict(holder, max(excess, holder.limit // BATCHES))
        self._enforce_total()

    def _enforce_total(self) -> None:
        while (excess := self.entries - self._total) > 0:
            largest = max(self._holders.values(), key=lambda other: len(other.blocks))
            self._evict(largest, max(excess, self._total // BATCHES))

    def _evict(self, holder: _Holder, count: int) -> None:
        # In batches: the front of a dict is slow to find again after each single removal.
        oldest = list(islice(holder.blocks, count))
        self.remove(holder.key, oldest)
        self.dropped += len(oldest)

    def _clear_bit(self, block: bytes, mask: int) -> None:
        left = self._bits[block] & ~mask
        if left:
            self._bits[block] = left
        else:
            del self._bits[block]


def _ones(words: Sequence[int], width: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The ones in `words` of up to `width` bits: the numbers of their words, and of their bits."""
    size = (width + 7) // 8
    data = np.frombuffer(b"".join([word.to_bytes(size, "little") for word in words]), np.uint8)
    at = np.unpackbits(data, bitorder="little").view(np.bool_).nonzero()[0]
    word = at // (8 * size)
    return word, at - word * (8 * size)
