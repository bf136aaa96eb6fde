"""Which replica caches which block: one dict from block hash to a bitmask of replicas, fed by KV events.

A block's hash holds its whole prefix, so the longest cached prefix of a prompt, for all replicas at once, is a walk along its
hashes that keeps the bits which no block has cleared yet.
"""

from collections.abc import Iterable, Sequence

from penstock.gateway.picker.candidates import ReplicaKey


class ResidencyIndex:
    """Exact residency of KV blocks. What it says is a hint: a wrong entry costs a prefill, never a request."""

    def __init__(self) -> None:
        self._bits: dict[bytes, int] = {}
        self._slots: dict[ReplicaKey, int] = {}
        self._keys: list[ReplicaKey | None] = []
        self._blocks: dict[ReplicaKey, set[bytes]] = {}
        """The same by replica, so that emptying one costs its own blocks and not everybody's."""

    def __len__(self) -> int:
        return len(self._bits)

    def blocks(self, key: ReplicaKey) -> int:
        """How many blocks `key` is known to cache."""
        return len(self._blocks.get(key, ()))

    def store(self, key: ReplicaKey, hashes: Iterable[bytes]) -> None:
        """`key` caches these blocks now; those it cached already change nothing."""
        bit = 1 << self._slot(key)
        bits, own = self._bits, self._blocks[key]
        for block in hashes:
            bits[block] = bits.get(block, 0) | bit
            own.add(block)

    def remove(self, key: ReplicaKey, hashes: Iterable[bytes]) -> None:
        """`key` caches these blocks no more; unknown ones are ignored."""
        own = self._blocks.get(key)
        if own is None:
            return
        keep = ~(1 << self._slots[key])
        for block in hashes:
            if block in own:
                own.discard(block)
                self._clear_bit(block, keep)

    def clear(self, key: ReplicaKey) -> None:
        """Nothing is known of `key` any more."""
        own = self._blocks.get(key)
        if own is None:
            return
        keep = ~(1 << self._slots[key])
        for block in own:
            self._clear_bit(block, keep)
        own.clear()

    def drop(self, key: ReplicaKey) -> None:
        """`key` is gone; its bit may be given to another replica, since no block holds it any more."""
        self.clear(key)
        self._blocks.pop(key, None)
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._keys[slot] = None

    def longest_prefix(self, hashes: Sequence[bytes]) -> dict[ReplicaKey, int]:
        """Leading blocks of `hashes` that each replica caches; replicas with none are left out."""
        depths: dict[ReplicaKey, int] = {}
        alive = -1
        depth = 0
        for depth, block in enumerate(hashes):
            still = alive & self._bits.get(block, 0)
            if still != alive and depth:
                self._note(depths, alive & ~still, depth)
            alive = still
            if not alive:
                return depths
        if hashes:
            self._note(depths, alive, depth + 1)
        return depths

    def _note(self, depths: dict[ReplicaKey, int], bits: int, depth: int) -> None:
        while bits:
            lowest = bits & -bits
            key = self._keys[lowest.bit_length() - 1]
            if key is not None:
                depths[key] = depth
            bits ^= lowest

    def _slot(self, key: ReplicaKey) -> int:
        slot = self._slots.get(key)
        if slot is None:
            slot = self._keys.index(None) if None in self._keys else len(self._keys)
            if slot == len(self._keys):
                self._keys.append(key)
            self._keys[slot] = key
            self._slots[key] = slot
            self._blocks[key] = set()
        return slot

    def _clear_bit(self, block: bytes, keep: int) -> None:
        left = self._bits[block] & keep
        if left:
            self._bits[block] = left
        else:
            del self._bits[block]
