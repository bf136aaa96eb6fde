"""Prompts under way: blocks that a replica will cache because a request that was sent there computes them.

Of two equal prompts that come at once the second would else find nothing cached anywhere and be computed again at another
replica. What the first still has to compute stands in its booking; here stands that nobody computes it twice at the same place.
While it runs it holds its blocks, so what is said here stays true until its booking ends, and by then the replica's events have
told the same.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from penstock.gateway.picker.bookings import Booking, Bookings
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.figures import Floats
from penstock.gateway.picker.request import Prompt

KEPT: Final = 16_384
"""Prompts under way that are known at most; the oldest go first."""


class _Prompt(NamedTuple):
    booking: Booking
    hashes: Sequence[bytes]
    depth: int
    """Where the first block stands that its replica did not have."""


class Coming:
    """The prompts under way of all replicas. A prompt is found by the first block that it has to compute: whoever shares any of
    what it computes shares that one, since a block's hash holds its whole prefix."""

    def __init__(self, bookings: Bookings) -> None:
        self._prompts: dict[Booking, _Prompt] = {}
        self._by_first: dict[bytes, list[_Prompt]] = {}
        self._depths: Counter[int] = Counter()
        """Where the first blocks stand: at the same places in every prompt that has them."""
        bookings.ended.append(lambda booking, by: self._forget(booking))

    def __len__(self) -> int:
        return len(self._prompts)

    def expect(self, booking: Booking, hashes: Sequence[bytes], resident_blocks: int) -> None:
        """The replica of `booking` computes the blocks `hashes` but for the first `resident_blocks`, which it has, or which
        another prompt under way leaves there."""
        if resident_blocks >= len(hashes):
            return
        prompt = self._prompts[booking] = _Prompt(booking, hashes, resident_blocks)
        self._by_first.setdefault(hashes[resident_blocks], []).append(prompt)
        self._depths[resident_blocks] += 1
        if len(self._prompts) > KEPT:
            self._forget(next(iter(self._prompts)))

    def add_to(
        self,
        tokens: Floats,
        prompt: Prompt,
        block_size: int,
        rows: Mapping[ReplicaKey, int],
        among: Collection[ReplicaKey] | None,
    ) -> None:
        """Raises `tokens`, those of `prompt` that each row's cache would supply, to what it will have when its turn comes.

        Args:
            tokens: float64 [rows]; changed in place.
            prompt: The only one of its request.
            block_size: Tokens in a block of its.
            rows: The row of each replica.
            among: The replicas whose hashes are comparable with the prompt's; None: all.
        """
        hashes = prompt.block_hashes
        most = (prompt.tokens - 1) // block_size
        for depth in self._depths:
            for other in self._by_first.get(hashes[depth], ()) if depth < len(hashes) else ():
                key = other.booking.key
                if key in rows and (among is None or key in among):
                    supplied = min(_shared(hashes, other.hashes, depth + 1), most) * block_size
                    tokens[rows[key]] = max(tokens[rows[key]], supplied)

    def _forget(self, booking: Booking) -> None:
        prompt = self._prompts.pop(booking, None)
        if prompt is None:
            return
        first = prompt.hashes[prompt.depth]
        same = self._by_first[first]
        same.remove(prompt)
        if not same:
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
