"""How many drafts pay: verifying makes a step longer, and gains a token only where a draft and all before it are accepted."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.engine.core.plan import Int32

Float64 = npt.NDArray[np.float64]

HOPE, HIGH_HOPE = 0.7, 0.9
"""Acceptance that is believed in before anything is known: of what stands in text, and of guesses of a model. These cost more:
with less hope nobody would find out how good they are."""
_SHARED: Final = 0.02
"""Weight of a draft in the acceptance that a new request is believed to have."""
_FORGOTTEN: Final = 0.0005
"""How far this goes back to what was hoped in a step without drafts: in some thousand steps all is tried again."""
_WEIGHT: Final = 0.15
"""Of a draft in a row's acceptance."""
_STEPS_OF_ACCEPTANCE: Final = 100
"""From 0 to 1: what a draft gains is looked up."""
_RETURN: Final = 0.01
"""How far a row's acceptance goes back to what new requests have, in a step without drafts."""
_NEWEST: Final = 0.1
"""Weight of a step's seconds in those that are usual."""
_OFFERED: Final = 0.2
"""Weight of a look-up in how many drafts the proposer usually has."""
_COMPARED: Final = 0.1
"""Weight of two neighbouring steps in what drafts cost, at least. The first of them count for more: at the start texts were short
and no row was sampled as its client wants."""
_AT_START: Final = 4
"""Comparisons that the measurement at the start is worth: the first steps of a shape have no tape, which costs more."""
_LONGEST_RUN: Final = 64
"""Steps with drafts, after which one without is compared with them."""
_FIRST_RUNS: Final = 8
"""The same, while less was compared than the measurement at the start is worth."""
_OUTLIER: Final = 3.0
"""Times the usual, above which a step's seconds are taken for somebody else's doing."""
_MARGIN: Final = 1.05
"""Times the tokens a second without drafts that are wanted of drafts."""
_UNLEARNED: Final = 1.15
"""The same where what drafts cost is only known from the start."""
_LONGEST_REST: Final = 32
_FEWER: Final = 8
"""Steps with few rows in a row: between two waves of requests there are fewer."""
_IDLE_AFTER: Final = 16
"""Steps of a rest, after which who must read every step to propose anything is told of none: that costs more than to ask."""
_LONGEST_IDLE: Final = 512
"""Steps of such a rest."""
_MOST_CREDIT: Final = 6.0
"""Steps without drafts that drafts may have cost, all told, beyond what they have gained. What they gain
beyond is not saved up: they cost no more than this where texts change for the worse."""
_MOST_DEBT: Final = 1.0
"""Beyond it, of a step that was held up, say: it is tried again some time."""
_EARNED: Final = 0.005
"""Credit of a step without drafts: to find out whether drafts pay again costs no more than this."""
_WELCOME: Final = 0.125
"""Credit of a request, among all rows: its text may be another than those before."""
_SHORTEST_WAIT: Final = 2
_LONGEST_WAIT: Final = 8
"""Steps for which a proposer that has found nothing is not asked again, at most: its text may begin to repeat at any token."""


class Timing(NamedTuple):
    """Measured: a step of so many rows with so many drafts each."""

    rows: int
    drafts: int
    seconds: float


class DraftDepth:
    """Chooses one number of drafts for all rows of a step, so that steps have few shapes.

    It reckons with Python's numbers: of one row and four depths, NumPy's operations took a twentieth of a small model's step.

    Args:
        max_num_seqs: Rows.
        num_drafts: K, drafts of a row at most.
        timings: For several numbers of rows, ascending, steps with several numbers of drafts, 0 and K among them.
        hope: Acceptance that is believed in.
    """

    def __init__(self, max_num_seqs: int, num_drafts: int, timings: Sequence[Timing], hope: float = HOPE) -> None:
        self._acceptance = [hope] * max_num_seqs
        self._hope = self._usual = hope
        self.depths = depths(num_drafts)
        self._gains = _gains(self.depths)
        self._remembered = [(1 - _WEIGHT) ** judged for judged in range(num_drafts + 1)]
        """By the number of drafts that were judged: weight of what was known of a row before."""
        self._offered = float(num_drafts)
        """Drafts of a row that the proposer usually has."""
        self._places = {depth: at for at, depth in enumerate(self.depths)}
        seconds = self._table(max_num_seqs, timings)
        self._usual_s: Float64 = seconds[:, 0].copy()
        """[sizes]: of a step without drafts."""
        self._measured: Float64 = seconds / seconds[:, :1]
        self._costs: Float64 = self._measured.copy()
        """[sizes, depths]: of a step, as multiples of one without drafts."""
        self._comparisons: npt.NDArray[np.int64] = np.zeros(seconds.shape, np.int64)
        self._plain_s: dict[int, float] = {}
        """By size: seconds of the last step without drafts."""
        self._before: tuple[int, int, float] | None = None
        """Size, place and seconds of the step that was observed last."""
        self._rest, self._rested, self._next_rest, self._run = 0, 0, 1, 0
        self._idle, self._fewer = False, 0
        self._num_rows = 1
        """Of the last choice."""
        self._credit: Float64 = np.full(len(seconds), _MOST_CREDIT)
        """[sizes]: what drafts may still cost, in steps without drafts: what costs too much for many rows may pay for few."""

    def learns_from(self, drafts: int) -> bool:
        """Whether the time of a step with so many drafts is to be observed; of one without any only behind one that had some."""
        return drafts in self._places if drafts else self._before is not None and self._before[1] > 0

    def at_most(self, drafts: int) -> int:
        """The largest depth that is not above so many drafts."""
        return max((depth for depth in self._places if depth <= drafts), default=0)

    def admit(self, row: int) -> None:
        """Another request has the row, which ends the rest if drafts pay for requests like the last ones. Among many rows it is
        of less weight, and waits a little."""
        self._acceptance[row] = self._usual
        self._earn(self._num_rows, _WELCOME / self._num_rows)
        wait = 0 if self._idle else self._num_rows // 4  # who misses its first step never makes up for it
        if self._rest <= wait or not self._has_credit:
            return
        if self._best(self._tokens([self._usual], [round(self._offered)]), self._num_rows):
            self._rest = wait
            if not wait:
                self._next_rest = 1

    def rests(self, num_rows: int) -> bool:
        """Whether the next choice, of so many rows, is none, which costs nothing; to be asked once a step. What does not pay for
        many rows may pay for few."""
        self._fewer = self._fewer + 1 if _size(num_rows) < _size(self._num_rows) else 0
        if self._fewer == _FEWER:
            self._rest, self._next_rest, self._num_rows = 0, 1, num_rows
        if self._rest == 0:
            return False
        self._rest -= 1
        self._rested += 1
        return True

    @property
    def idle(self) -> bool:
        """Whether a proposer that reads every step need not read those of this rest."""
        return self._idle

    def observe(self, rows: Int32, drafted: Int32, accepted: Int32, others: int = 0) -> None:
        """Takes in a step: [m] rows, the drafts that were verified, and how many of them were accepted. There were so many others
        beside them."""
        given, right = drafted.tolist(), accepted.tolist()
        if given:
            count = len(given) + others
            cost = self._costs[_size(count), bisect_left(self.depths[:-1], max(given))]
            self._earn(count, (sum(right) - (float(cost) - 1) * len(given)) / count)
        total = 0
        for row, has, good in zip(rows.tolist(), given, right, strict=True):
            # A draft after a rejected one says nothing.
            if judged := min(good + 1, has):
                known = self._remembered[judged]
                self._acceptance[row] = known * self._acceptance[row] + (1 - known) * good / judged
                total += judged
        if total:
            weight = 1 - (1 - _SHARED) ** total
            self._usual += weight * (sum(right) / total - self._usual)

    def observe_step(self, num_rows: int, drafts: int, seconds: float) -> None:
        """Takes in how long a step of decodes with so many drafts each took, all told.

        Who else uses the machine slows steps with drafts and without alike. So what drafts cost is read from neighbours alone.
        """
        size, place = _size(num_rows), self._places[drafts]
        costs, before, self._before = self._costs[size], self._before, None
        plain = seconds / float(costs[place])
        if plain >= _OUTLIER * float(self._usual_s[size]):
            # A machine that has become this slow for good is believed in the end.
            self._usual_s[size] *= 1 + _NEWEST
            return
        self._usual_s[size] += _NEWEST * (plain - float(self._usual_s[size]))
        self._before = size, place, seconds
        if not place:
            self._plain_s[size] = seconds
        elif (before is None or before[0] != size or before[1]) and size in self._plain_s:
            # Among prompts that are read, steps of decodes alone are rare: an earlier one will do.
            before = size, 0, self._plain_s[size]
        if before is None or before[0] != size or before[1] == place:
            return
        of = place or before[1]
        found = seconds / before[2] * float(costs[before[1]]) if place else before[2] / seconds
        self._comparisons[size, of] += 1
        costs[of] += max(_COMPARED, 1 / (_AT_START + int(self._comparisons[size, of]))) * (found - float(costs[of]))

    def followed(self, num_rows: int, seconds: float) -> None:
        """Takes in what a proposer that reads every step took for one without drafts."""
        self._earn(num_rows, -seconds / float(self._usual_s[_size(num_rows)]))

    @property
    def _has_credit(self) -> bool:
        return float(self._credit[_size(self._num_rows)]) > 0

    def _earn(self, num_rows: int, steps: float) -> None:
        size = _size(num_rows)
        self._credit[size] = min(max(float(self._credit[size]) + steps, -_MOST_DEBT), _MOST_CREDIT)

    def most(self, rows: Int32, others: int = 0) -> int:
        """The most drafts that can pay for these rows, [m], beside so many that get none, however many a proposer has. It is one
        that reads every step, which is not free either."""
        self._forget(rows, others)
        best = self._best(self._most_tokens(rows), len(rows), others, _UNLEARNED)
        if not self._has_credit:
            best, self._next_rest = 0, _LONGEST_IDLE
        if not best:
            self._begin_rest(_LONGEST_IDLE)
            self._idle = self._rest > _IDLE_AFTER
        return best

    def _forget(self, rows: Int32, others: int) -> None:
        """What was learned before a rest goes back to what was believed at first."""
        self._idle, self._num_rows = False, len(rows) + others
        if not self._rested:
            return
        self._usual += min(_FORGOTTEN * self._rested, 1) * (self._hope - self._usual)
        for row in rows.tolist():
            self._acceptance[row] += min(_RETURN * self._rested, 1) * (self._usual - self._acceptance[row])
        size, at = _size(self._num_rows), min(_FORGOTTEN * self._rested, 1)
        self._costs[size] += at * (self._measured[size] - self._costs[size])
        self._earn(self._num_rows, _EARNED * self._rested)
        self._rested = 0

    def found_nothing(self, rows: Int32) -> None:
        """The proposer has nothing for these rows, [m], which is the same as a choice of none."""
        self._num_rows = len(rows)
        self._offered -= _OFFERED * self._offered
        self._next_rest = max(self._next_rest, _SHORTEST_WAIT)
        self._begin_rest(_LONGEST_WAIT)

    def choose(self, rows: Int32, proposed: Int32, others: int = 0) -> int:
        """How many drafts of each row make the most tokens a second, given how many the proposer has, [m]; see `most`."""
        self._forget(rows, others)
        offers = proposed.tolist()
        self._offered += _OFFERED * (sum(offers) / len(offers) - self._offered)
        acceptance = [self._acceptance[row] for row in rows.tolist()]
        best = self._best(self._tokens(acceptance, offers), len(rows), others) if any(offers) else 0
        if not best:
            # Where more drafts would pay, it is the proposer that has too few, and its text may begin to repeat at any token.
            would = self._best(self._most_tokens(rows), len(rows), others)
            self._begin_rest(_LONGEST_WAIT if would else _LONGEST_REST)
            return 0
        if not self._has_credit:
            self._next_rest = _LONGEST_REST
            self._begin_rest(_LONGEST_REST)
            return 0
        self._next_rest = 1
        self._run += 1
        known = self._comparisons[_size(self._num_rows)].sum() >= _AT_START
        if self._run >= (_LONGEST_RUN if known else _FIRST_RUNS):
            self._run = 0
            return 0
        return best

    def _begin_rest(self, most: int) -> None:
        self._rest = min(self._next_rest, most)
        self._next_rest = min(2 * self._rest, most)

    def _most_tokens(self, rows: Int32) -> list[float]:
        """As `_tokens`, were there as many drafts of these rows as there can be."""
        return self._tokens((self._acceptance[row] for row in rows.tolist()), [self.depths[-1]] * len(rows))

    def _tokens(self, acceptance: Iterable[float], proposed: Sequence[int]) -> list[float]:
        """[depths]: of a step, given the acceptance of its rows and their drafts."""
        last = _STEPS_OF_ACCEPTANCE - 1
        gains = [
            self._gains[min(int(_STEPS_OF_ACCEPTANCE * at), last)][has] for at, has in zip(acceptance, proposed, strict=True)
        ]
        return [sum(column) for column in zip(*gains, strict=True)]

    def _best(self, tokens: Sequence[float], num_rows: int, others: int = 0, margin: float = _MARGIN) -> int:
        """The depth that makes the most tokens a second; 0: no depth makes clearly more than no drafts. What it costs goes by the
        share of the rows that have drafts."""
        costs: list[float] = self._costs[_size(num_rows + others)].tolist()
        share = num_rows / (num_rows + others)
        rates = [(made + others) / (1 + (cost - 1) * share) for made, cost in zip(tokens, costs, strict=True)]
        best = rates.index(max(rates))
        return self.depths[best] if rates[best] > margin * rates[0] else 0

    def _table(self, max_num_seqs: int, timings: Sequence[Timing]) -> Float64:
        """[sizes, depths]: seconds of a step, interpolated."""
        sizes, measured = 2.0 ** np.arange(_size(max_num_seqs) + 1), sorted({it.drafts for it in timings})
        columns: list[Float64] = []
        for number in measured:
            points = [it for it in timings if it.drafts == number]
            columns.append(np.interp(sizes, [it.rows for it in points], [it.seconds for it in points]))
        return np.array([np.interp(self.depths, measured, seconds) for seconds in zip(*columns, strict=True)])


def _gains(depths: Sequence[int]) -> list[list[list[float]]]:
    """[acceptance, drafts that a proposer has, depths]: tokens of a row in a step."""
    drafts = np.minimum(np.array(depths), np.arange(depths[-1] + 1)[:, None])
    acceptance = np.arange(_STEPS_OF_ACCEPTANCE)[:, None, None] / _STEPS_OF_ACCEPTANCE
    return ((1 - acceptance ** (drafts + 1)) / (1 - acceptance)).tolist()


def depths(num_drafts: int) -> list[int]:
    """The numbers of drafts that are chosen from, up to `num_drafts`."""
    return sorted({0, *(2**power for power in range(6) if 2**power < num_drafts), num_drafts})


def _size(num_rows: int) -> int:
    """Of the row of the table: numbers of rows up to the same power of two share one."""
    return max(num_rows - 1, 0).bit_length()
