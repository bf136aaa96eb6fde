"""What steps with drafts cost, as multiples of steps without: measured at the start, and learned from steps as they come."""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

_FEW: Final = 0.25
"""Drafts of a row on average: where few rows have any."""
_PLAIN: Final = 3
"""Steps without drafts whose median others are compared with: one that was held up counts for nothing. Until there are as many,
those of the start stand in for the rest."""
_COMPARED: Final = 0.1
"""Weight of a step in what drafts cost, at least. The first of them count for more: at the start texts were short and no row was
sampled as its client wants."""
_AT_START: Final = 2
"""Comparisons that the measurement at the start is worth."""
_HELD_UP: Final = 3
"""Steps with drafts, of which the one in the middle counts, by what it took of what was expected of it. The first step of a shape
records its tape and takes several times as long, and others use the machine."""
_CLIP: Final = 2.0
"""A step counts as at most so many times what was expected of it, or as little: what stays so dear is believed in the end."""

_Floats = npt.NDArray[np.float64]
Place = tuple[int, float]
"""Between two of the numbers whose cost is known: which of them is the first that is not below, and how near to it from the one
before."""


class Timing(NamedTuple):
    """Measured."""

    rows: int
    drafts: float
    """Of a row, on average."""
    seconds: float


class StepCosts:
    """Costs by size of the batch and by drafts of a row on average, interpolated between some numbers of them.

    It goes by the average, since a step in which few rows have many drafts verifies few. Numbers of rows up to the same power of
    two share what is learned; how much longer a step of more rows takes is known from the start.

    Args:
        max_num_seqs: Rows.
        depths: The numbers of drafts that are chosen from, 0 first.
        timings: For several numbers of rows, ascending, steps with several numbers of drafts, 0 and the most among them.
    """

    def __init__(self, max_num_seqs: int, depths: Sequence[int], timings: Sequence[Timing]) -> None:
        self._knots = knots(depths)
        self.sizes = [size_of(rows) for rows in range(max_num_seqs + 1)]
        """By the number of rows: the size of the batch."""
        plain = [it for it in timings if not it.drafts]
        at = [it.rows for it in plain]
        self._plain_s: list[float] = np.interp(range(max_num_seqs + 1), at, [it.seconds for it in plain]).tolist()
        """By the number of rows: seconds of a step without drafts at the start."""
        self._measured = _measured(max_num_seqs, self._knots, timings)
        self._costs = [row.copy() for row in self._measured]
        self._levels: list[deque[float]] = [deque(maxlen=_PLAIN) for _ in self._costs]
        """By size: of the last steps without drafts, how many times as long they took as at the start."""
        self._level = [1.0] * len(self._costs)
        """By size: the median of these and the start's."""
        self._surprises = [deque([1.0] * _HELD_UP, maxlen=_HELD_UP) for _ in self._costs]
        """By size: of the last steps with drafts, how many times as long they took as was expected."""
        self._comparisons = [[0] * len(self._knots) for _ in self._costs]

    def of(self, num_rows: int, drafts: float) -> float:
        """Of a step with so many drafts of a row on average."""
        return self.at(num_rows, (self.place(drafts),))[0]

    def at(self, num_rows: int, places: Sequence[Place]) -> list[float]:
        """As `of`, where the places of several numbers of drafts are known."""
        costs = self._costs[self.sizes[num_rows]]
        return [costs[at - 1] + weight * (costs[at] - costs[at - 1]) if at else 1.0 for at, weight in places]

    def in_steps(self, num_rows: int, seconds: float) -> float:
        """Seconds as multiples of a step without drafts."""
        return seconds / (self._level[self.sizes[num_rows]] * self._plain_s[num_rows])

    def knows(self, num_rows: int) -> bool:
        """Whether as many steps without drafts have been observed as others are compared with."""
        return len(self._levels[self.sizes[num_rows]]) == _PLAIN

    def comparisons(self, num_rows: int, drafts: float) -> int:
        """How many steps with about so many drafts of a row have been observed."""
        return self._comparisons[self.sizes[num_rows]][self.place(drafts)[0]]

    def observe(self, num_rows: int, drafts: float, seconds: float) -> None:
        """Takes in how long a step with so many drafts of a row on average took, all told."""
        size = self.sizes[num_rows]
        levels = self._levels[size]
        if not drafts:
            levels.append(seconds / self._plain_s[num_rows])
            self._level[size] = sorted([*levels, *[1.0] * (_PLAIN - len(levels))])[_PLAIN // 2]
            return
        if not levels:
            return
        costs, counts = self._costs[size], self._comparisons[size]
        at, weight = place = self.place(drafts)
        expected = self.at(num_rows, (place,))[0]
        surprises = self._surprises[size]
        surprises.append(self.in_steps(num_rows, seconds) / expected)
        surprise = expected * (min(max(sorted(surprises)[_HELD_UP // 2], 1 / _CLIP), _CLIP) - 1)
        for knot, share in ((at, weight), (at - 1, 1 - weight)):
            if knot and share > 0:
                counts[knot] += 1
                costs[knot] += share * max(_COMPARED, 1 / (_AT_START + counts[knot])) * surprise

    def forget(self, num_rows: int, share: float) -> None:
        """Goes back to what was measured at the start by some of the way."""
        size = self.sizes[num_rows]
        measured = self._measured[size]
        self._costs[size] = [cost + share * (was - cost) for cost, was in zip(self._costs[size], measured, strict=True)]

    def place(self, drafts: float) -> Place:
        """Of so many drafts of a row on average."""
        at = bisect_left(self._knots, drafts, hi=len(self._knots) - 1)
        if not at:
            return 0, 1.0
        low, high = self._knots[at - 1], self._knots[at]
        return at, min((drafts - low) / (high - low), 1.0)


def size_of(num_rows: int) -> int:
    """Numbers of rows up to the same power of two share one."""
    return max(num_rows - 1, 0).bit_length()


def knots(depths: Sequence[int]) -> list[float]:
    """The drafts of a row on average whose cost is measured, where drafts of a row are chosen from `depths`."""
    return [0.0, _FEW, *map(float, depths[1:])]


def _measured(max_num_seqs: int, knots: Sequence[float], timings: Sequence[Timing]) -> list[list[float]]:
    """[sizes, knots]: what was measured, interpolated."""
    sizes, rows = 2.0 ** np.arange(size_of(max_num_seqs) + 1), sorted({it.rows for it in timings})
    seconds: list[_Floats] = []
    for number in rows:
        points = [it for it in timings if it.rows == number]
        seconds.append(np.interp(knots, [it.drafts for it in points], [it.seconds for it in points]))
    found = np.array([np.interp(sizes, rows, column) for column in zip(*seconds, strict=True)]).T
    return (found / found[:, :1]).tolist()
