"""Prompts in flight: blocks that a replica will cache because it computes a request that was sent there.

Without this, the second of two equal prompts that arrive together would find nothing cached anywhere and be computed again at
another replica. Its booking counts what the first still has to compute. This module makes sure that no replica is charged twice
for the same blocks. A request holds its blocks while it runs, so an entry stays true until its booking ends, and by then the
replica's events have reported the blocks.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from penstock.gateway.picker.bookings import Booking, Bookings
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.compiled import Compiled
from penstock.gateway.picker.request import Prompt

KEPT: Final = 16_384
"""Prompts under way that are known at most; the oldest go first."""


def coming_of(compiled: Compiled | None, bookings: Bookings) -> "Coming":
    """What these bookings, which are of the same kind, compute."""
    return Coming(bookings) if compiled is None else compiled.Coming(bookings, KEPT)


class _Prompt:
    """Equal prompts under way at one replica, which compute their blocks once."""

    __slots__ = ("bookings", "depth", "hashes", "key", "name")

    def __init__(self, key: ReplicaKey, hashes: Sequence[bytes], depth: int) -> None:
        self.key = key
        self.hashes = hashes
        self.depth = depth
        """Position of the first block that the replica did not have."""
        self.name = key, hashes[-1], depth
        """Equal for equal prompts: the last block's hash holds the whole prompt."""
        self.bookings = 0


class Coming:
    """Prompts in flight at all replicas, keyed by the first block that each must compute. Prompts that share any computed block
    share that one, since a block's hash covers its whole prefix."""

    def __init__(self, bookings: Bookings) -> None:
        self._prompts: dict[Booking, _Prompt] = {}
        self._by_first: dict[bytes, dict[tuple[ReplicaKey, bytes, int], _Prompt]] = {}
        self._depths: dict[int, int] = {}
        """How many prompts start to compute at each position."""
        bookings.ended.append(self._forget)
        bookings.moved.append(self._move)

    def __len__(self) -> int:
        return len(self._prompts)

    def expect(self, booking: Booking, hashes: Sequence[bytes], resident_blocks: int) -> None:
        """The replica of `booking` computes the blocks `hashes` but for the first `resident_blocks`, which it has, or which
        another prompt under way leaves there."""
        if resident_blocks >= len(hashes):
            return
        self._file(booking, hashes, resident_blocks)
        if len(self._prompts) > KEPT:
            self._forget(next(iter(self._prompts)))

    def _file(self, booking: Booking, hashes: Sequence[bytes], depth: int) -> None:
        prompt = _Prompt(booking.key, hashes, depth)
        same = self._by_first.setdefault(hashes[depth], {})
        if prompt.name not in same:
            same[prompt.name] = prompt
            self._depths[depth] = self._depths.get(depth, 0) + 1
        prompt = self._prompts[booking] = same[prompt.name]
        prompt.bookings += 1

    def _move(self, booking: Booking) -> None:
        """Record that another replica computes the prompt."""
        prompt = self._prompts.get(booking)
        if prompt is not None:
            self._forget(booking)
            self._file(booking, prompt.hashes, prompt.depth)

    def found(
        self,
        prompt: Prompt,
        block_size: int,
        rows: Mapping[ReplicaKey, int],
        among: Collection[ReplicaKey] | None,
    ) -> list[tuple[int, float]]:
        """Rows, and the tokens of `prompt` that the cache of each will have when its turn comes; a row may occur several times.

        Args:
            prompt: The only one of its request.
            block_size: Tokens in a block of its.
            rows: The row of each replica.
            among: The replicas whose hashes are comparable with the prompt's; None: all.
        """
        hashes = prompt.block_hashes
        most = (prompt.tokens - 1) // block_size
        found: list[tuple[int, float]] = []
        for depth in self._depths:
            for other in self._by_first.get(hashes[depth], {}).values() if depth < len(hashes) else ():
                key = other.key
                if key in rows and (among is None or key in among):
                    found.append((rows[key], float(min(_shared(hashes, other.hashes, depth + 1), most) * block_size)))
        return found

    def _forget(self, booking: Booking, by: str = "") -> None:
        """The booking computes it no more, whatever has ended that."""
        prompt = self._prompts.pop(booking, None)
        if prompt is None:
            return
        prompt.bookings -= 1
        if prompt.bookings:
            return
        first = prompt.hashes[prompt.depth]
        del self._by_first[first][prompt.name]
        if not self._by_first[first]:
            del self._by_first[first]
        self._depths[prompt.depth] -= 1
        if not self._depths[prompt.depth]:
            del self._depths[prompt.depth]


def _shared(one: Sequence[bytes], other: Sequence[bytes], least: int) -> int:
    """Leading blocks that both have, which are `least` or more."""
    most = min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            least = middle
        else:
            most = middle - 1
    return least
