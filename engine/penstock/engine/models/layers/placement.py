"""Which rank holds which experts of a layer. Light to import."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


class Placement(NamedTuple):
    """A layer's experts in slots, which are numbered through all ranks. A busy expert may have several slots."""

    expert: Int64
    """[slots]: whose weights a slot has."""
    starts: Int64
    """[ranks + 1]: rank r has the slots from `starts[r]` to `starts[r + 1]`."""
    copies: Int64
    """[experts]: slots of each expert."""
    slots: Int64
    """[experts, most copies]: its slots, ascending; -1 pads."""

    @classmethod
    def of(cls, expert: Int64, starts: Int64, experts: int) -> "Placement":
        """Of the expert in each slot; ValueError where one has no slot."""
        copies = np.bincount(expert, minlength=experts)
        if (missing := np.flatnonzero(copies == 0)).size:
            raise ValueError(f"expert {missing[0]} is in no slot")
        slots = np.full((experts, int(copies.max())), -1, np.int64)
        for number in range(experts):
            slots[number, : copies[number]] = np.flatnonzero(expert == number)
        return cls(expert, starts, copies, slots)

    @classmethod
    def linear(cls, experts: int, ranks: int, redundant: int = 0) -> "Placement":
        """Expert after expert, then second copies of the first ones; the first ranks have one slot more where they do not divide.
        ValueError where a rank would have none."""
        slots = experts + redundant
        if slots < ranks:
            raise ValueError(f"{experts} experts" + (f" + {redundant} redundant" if redundant else "") + f" on {ranks} ranks")
        each, more = divmod(slots, ranks)
        starts = np.array([rank * each + min(rank, more) for rank in range(ranks + 1)])
        return cls.of(np.arange(slots) % experts, starts, experts)

    @property
    def rank_of(self) -> Int64:
        """[slots]: the rank that has each."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    def own(self, rank: int) -> Sequence[int]:
        """The experts in a rank's slots."""
        return self.expert[self.starts[rank] : self.starts[rank + 1]].tolist()

    def local(self, rank: int) -> Int64:
        """[experts]: an expert's first slot among the rank's own; -1: it has none there."""
        found = np.full(len(self.copies), -1, np.int64)
        for place, expert in reversed(list(enumerate(self.own(rank)))):
            found[expert] = place
        return found

    def route(self, ids: Int64, tokens: Int64) -> Int64:
        """The slot that computes each choice. Copies of an expert take turns by the token's number, by Knuth's multiplicative
        hash: all ranks find the same, and neighbours go to different copies.

        Args:
            ids: [n, k]: experts.
            tokens: [n]: numbers of the tokens, below 2^32.
        """
        turn = (tokens * 2_654_435_769 & 0xFFFFFFFF)[:, None] % self.copies[ids]
        return self.slots[ids, turn]
