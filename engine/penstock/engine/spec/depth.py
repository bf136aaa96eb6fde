"""How many drafts pay: verifying makes a step longer, and gains a token only where a draft and all before it are accepted."""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Final, NamedTuple

from penstock.engine.core.plan import Int32
from penstock.engine.spec.acceptance import Acceptance, Chances
from penstock.engine.spec.costs import Place, StepCosts, Timing
from penstock.engine.spec.filling import Filling, unfilled

HOPE, HIGH_HOPE = 0.7, 0.9
"""Acceptance that is believed in before anything is known: of what stands in text, and of guesses of a model. These cost more:
with less hope nobody would find out how good they are."""
MARGIN, HIGH_MARGIN = 1.08, 1.15
"""Times the tokens a second without drafts that are wanted of drafts: of those that are looked up, and of a proposer that reads
every step."""
_FORGOTTEN: Final = 0.0005
"""How far this goes back to what was hoped in a step without drafts: in some thousand steps all is tried again."""
_FIRST: Final = 8
"""Drafts of a step while none was judged, or the fewest that there are steps for. Later steps have at most three times as many as
were judged: while only hope speaks for drafts, those of a full batch would cost two steps to find out that they are wrong."""
_OFFERED: Final = 0.2
"""Weight of a look-up in how many drafts the proposer usually has."""
_WARM: Final = 4
"""Steps without drafts in a row, the last of which is compared with those that have some: the first of them take longer, which is
the drafts' doing and would make these seem cheaper than they are."""
_WARMER: Final = 16
"""Steps of a rest, the last of which is compared, too: the fourth still takes a little longer than those far from drafts."""
_LONGEST_RUN: Final = 256
"""Steps with drafts, after which so many without are made."""
_SHORTEST_RUN: Final = 16
"""The same where drafts gain little."""
_COMPARING: Final = 0.0025
"""Of a step, a quarter of what such comparisons may cost in each: the less drafts gain, the sooner it is seen that they gain
nothing."""
_PROVED: Final = 1.02
"""The same while the last look-ups have gained more than they cost."""
_LONGEST_REST: Final = 32
_FEWER: Final = 8
"""Steps with few rows in a row: between two waves of requests there are fewer."""
_IDLE_AFTER: Final = 16
"""Steps of a rest, after which who must read every step to propose anything is told of none: that costs more than to ask."""
_LONGEST_IDLE: Final = 512
"""Steps of such a rest."""
_MOST_CREDIT: Final = 4.0
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
_SOONER: Final = 4
"""Times as soon a proposer is asked again after a find: one among many look-ups in vain is no text that repeats."""
_ASKED, _MOST_ASKED = 0.02, 0.05
"""Weight of a row in what a look-up is worth, and of all rows. The text of one repeats now and then, for many steps in a row."""
_STANDS: Final = 7
"""Steps for which a choice of all drafts stands, unless one of them is wrong. To choose and to learn what it has cost takes a
twentieth of a small model's step."""
_KNOWN_WELL: Final = 4
"""Comparisons of steps with as many drafts, before a choice stands."""
_VAIN: Final = 0.005
"""Of the time of such steps that asking may take: who takes long to look up waits longer."""


class _Best(NamedTuple):
    """So many drafts of all rows together, and the tokens a second that they make, as a multiple of those without drafts."""

    drafts: int
    rate: float


class _Judged(NamedTuple):
    """A step, as `DraftDepth.observe` takes it in."""

    rows: list[int]
    drafted: list[int]
    accepted: list[int]
    others: int
    verified: int


class _Filled(NamedTuple):
    """Steps that are filled up to the same size, by the number of rows."""

    drafts: list[int]
    """Of all rows together, those that fill up among them; ascending."""
    places: list[Place]
    """Where the costs of such steps are."""


class DraftDepth:
    """Chooses how many drafts of each row a step verifies: of all that there are, the likeliest, as many as pay.

    Args:
        max_num_seqs: Rows.
        num_drafts: K, drafts of a row at most.
        timings: As of `StepCosts`.
        hope: Acceptance that is believed in.
        fill: How steps with drafts are filled up.
        margin: Times the tokens a second without drafts that are wanted of drafts.
    """

    def __init__(
        self,
        max_num_seqs: int,
        num_drafts: int,
        timings: Sequence[Timing],
        hope: float = HOPE,
        fill: Filling = unfilled,
        margin: float = MARGIN,
    ) -> None:
        self._margin = margin
        self.acceptance = Acceptance(max_num_seqs, num_drafts, hope)
        self.depths = depths(num_drafts)
        self._offered = float(num_drafts)
        """Drafts of a row that the proposer usually has."""
        self.fill = fill
        """How steps with drafts are filled up."""
        self.costs = StepCosts(max_num_seqs, self.depths, timings)
        self._filled: dict[int, _Filled] = {}
        self._plain, self._compares, self._far = 0, False, False
        """Steps without drafts that were observed since there were some, whether another one is looked for, and whether the next
        step is the last one of a long rest."""
        self._rest, self._rested, self._next_rest, self._run = 0, 0, 1, 0
        self._missed = 0
        """How often in a row such steps told nothing, since they took in prompts, say: then it is tried more seldom."""
        self._idle, self._fewer = False, 0
        self._num_rows = 1
        """Of the last choice."""
        self._wait = _LONGEST_WAIT
        """Steps after which a proposer that has found too little is asked again, at most."""
        self._worth = [0.0] * (self.costs.sizes[-1] + 1)
        """[sizes]: what a look-up has gained on average, in steps without drafts. Above 0 it pays to ask after each step."""
        self._stands, self._stands_for, self._repeats = 0, list[int](), False
        """Steps for which the last choice still stands, for which rows, and whether the last step's was made because of it."""
        self._unread: list[_Judged] = []
        """Steps whose drafts were all right, while it stands."""
        self._credit = [_MOST_CREDIT] * (self.costs.sizes[-1] + 1)
        """[sizes]: what drafts may still cost, in steps without drafts: what costs too much for many rows may pay for few."""

    def learns_from(self, num_rows: int, drafts: int) -> bool:
        """Whether the time of a step is to be observed: of one with drafts where these were chosen anew, of one without only soon
        after one that had some, at the end of a long rest, or where none of as many rows is known yet."""
        if drafts:
            return not self._repeats
        return self._compares or self._far or not self.costs.knows(num_rows)

    def admit(self, row: int) -> None:
        """Another request has the row, which ends the rest if drafts pay for requests like the last ones. Among many rows it is
        of less weight, and waits a little."""
        self._stand_no_longer()
        self.acceptance.admit(row)
        self._earn(self._num_rows, _WELCOME / self._num_rows)
        wait = 0 if self._idle else self._num_rows // 4  # who misses its first step never makes up for it
        if self._rest <= wait or not self._has_credit:
            return
        if self._would_pay():
            self._rest = wait
            if not wait:
                self._next_rest = 1

    def _would_pay(self) -> bool:
        """Whether as many drafts of each row as the proposer usually has would, or fewer, if all were like the last requests."""
        rows, made = self._num_rows, 1.0
        for drafts, chance in enumerate(self.acceptance.of_new()[: round(self._offered)], 1):
            made += chance
            if self._rate(rows, drafts * rows, made * rows) > self._margin:
                return True
        return False

    def rests(self, num_rows: int) -> bool:
        """Whether the next choice, of so many rows, is none, which costs nothing; to be asked once a step. What does not pay for
        many rows may pay for few."""
        self._repeats = self._far = False
        sizes = self.costs.sizes
        self._fewer = self._fewer + 1 if sizes[num_rows] < sizes[self._num_rows] else 0
        if self._fewer == _FEWER:
            self._rest, self._next_rest, self._num_rows = 0, 1, num_rows
        if self._rest == 0:
            return False
        self._rest -= 1
        self._rested += 1
        self._far = not self._rest and self._rested >= _WARMER
        return True

    @property
    def idle(self) -> bool:
        """Whether a proposer that reads every step need not read those of this rest."""
        return self._idle

    def observe(self, rows: Int32, drafted: Int32, accepted: Int32, others: int = 0, verified: int = 0) -> None:
        """Takes in a step: [m] rows, the drafts that were verified, and how many of them were accepted. There were so many others
        beside them. So many drafts were verified with what rows were filled up with."""
        judged = _Judged(rows.tolist(), drafted.tolist(), accepted.tolist(), others, verified)
        self._unread.append(judged)
        if not self._stands or judged.accepted != judged.drafted:
            self._stand_no_longer()

    def _stand_no_longer(self) -> None:
        """The next choice is made anew: takes in the steps that have been put off."""
        self._stands = 0
        for rows, drafted, accepted, others, verified in self._unread:
            if rows:
                count = len(rows) + others
                gained = sum(accepted) / count - (self.costs.of(count, max(sum(drafted), verified) / count) - 1)
                self._earn(count, gained)
                self._asked(count, gained)
            self.acceptance.observe(rows, drafted, accepted)
        self._unread.clear()

    def observe_step(self, num_rows: int, drafts: float, seconds: float) -> None:
        """Takes in how long a step of decodes with so many drafts of a row on average took, with what looking them up took."""
        self._plain = 0 if drafts else self._plain + 1
        self._compares = self._plain < _WARM
        if not drafts and self._compares:
            return
        self.costs.observe(num_rows, drafts, seconds)
        if not drafts:
            self._run = self._missed = 0

    def followed(self, num_rows: int, seconds: float) -> None:
        """Takes in what a proposer that reads every step took for one without drafts."""
        self._earn(num_rows, -self.costs.in_steps(num_rows, seconds))

    def in_vain(self, num_rows: int, seconds: float) -> None:
        """Takes in what it took to look up what does not pay."""
        steps = self.costs.in_steps(num_rows, seconds)
        self._wait = min(max(_LONGEST_WAIT, round(steps / _VAIN)), _LONGEST_REST)
        self._asked(num_rows, -steps)

    def _asked(self, num_rows: int, gained: float) -> None:
        """Takes in what a look-up has gained, in steps."""
        size = self.costs.sizes[num_rows]
        self._worth[size] += min(_ASKED * num_rows, _MOST_ASKED) * (gained - self._worth[size])

    @property
    def _is_worth_it(self) -> bool:
        return self._worth[self.costs.sizes[self._num_rows]] > 0

    @property
    def _has_credit(self) -> bool:
        return self._credit[self.costs.sizes[self._num_rows]] > 0

    def _earn(self, num_rows: int, steps: float) -> None:
        size = self.costs.sizes[num_rows]
        self._credit[size] = min(max(self._credit[size] + steps, -_MOST_DEBT), _MOST_CREDIT)

    def most(self, rows: Int32, others: int = 0) -> int:
        """The most drafts that can pay for these rows, [m], beside so many that get none, however many a proposer has. It is one
        that reads every step, which is not free either, and makes as many of each row."""
        self._forget(rows, others)
        best, count = _Best(0, self._margin), len(rows) + others
        chances = self.acceptance.of_whole(rows.tolist())
        for depth in self.depths[1:]:
            rate = self._rate(count, depth * len(rows), count + sum(sum(of[:depth]) for of in chances))
            if rate > best.rate:
                best = _Best(depth * len(rows), rate)
        if not best.drafts or not self._has_credit:
            if not self._has_credit:
                self._next_rest = _LONGEST_IDLE
            self._begin_rest(_LONGEST_IDLE)
            self._idle = self._rest > _IDLE_AFTER
            return 0
        return 0 if self._compared(best) else best.drafts // len(rows)

    def _forget(self, rows: Int32, others: int) -> None:
        """What was learned before a rest goes back to what was believed at first."""
        self._idle, self._num_rows = False, len(rows) + others
        if not self._rested:
            return
        forgotten = min(_FORGOTTEN * self._rested, 1)
        self.acceptance.forget(rows.tolist(), forgotten, self._rested)
        self.costs.forget(self._num_rows, forgotten)
        self._earn(self._num_rows, _EARNED * self._rested)
        self._rested = 0

    def found_nothing(self, rows: Int32) -> None:
        """The proposer has nothing for these rows, [m], which is the same as a choice of none."""
        self._stand_no_longer()
        self._num_rows, self._rested = len(rows), self._rested + 1
        self._offered -= _OFFERED * self._offered
        if not self._is_worth_it:
            self._next_rest = max(self._next_rest, _SHORTEST_WAIT)
            self._begin_rest(self._wait)

    def choose(self, rows: Int32, proposed: Int32, usable: Int32, others: int = 0) -> list[int] | None:
        """How many drafts of each row make the most tokens a second; None: none pay.

        Args:
            rows: [m].
            proposed: [m]: how many drafts a proposer that looks them up has.
            usable: [m]: how many of these each row has use for.
            others: Rows beside these.
        """
        named, offers, useful = rows.tolist(), proposed.tolist(), usable.tolist()
        count = len(offers) + others
        if self._stands and named == self._stands_for and count == self._num_rows and min(offers) == self.depths[-1]:
            self._stands, self._run, self._repeats = self._stands - 1, self._run + 1, True
            return useful
        self._stand_no_longer()
        self._forget(rows, others)
        self._offered += _OFFERED * (sum(offers) / len(offers) - self._offered)
        chances = self.acceptance.of_next(named, offers, useful)
        best = self._best(chances, count)
        if not best.drafts:
            # Where more drafts would pay, it is the proposer that has too few, and its text may begin to repeat at any token.
            would = self._best(self.acceptance.of_whole(named), count)
            self._rested += 1
            if not would.drafts or not self._is_worth_it:
                self._begin_rest(self._wait if would.drafts else _LONGEST_REST)
            return None
        if not self._has_credit and not self._is_worth_it:
            self._next_rest = _LONGEST_REST
            self._begin_rest(_LONGEST_REST)
            return None
        self._next_rest = max(self._next_rest // _SOONER, 1)
        self.acceptance.proposed(named, offers)
        if self._compared(best):
            return None
        if best.drafts == len(offers) * self.depths[-1] and self.costs.comparisons(count, self.depths[-1]) >= _KNOWN_WELL:
            self._stands, self._stands_for = _STANDS, named
        return _likeliest(chances, best.drafts)

    def _compared(self, best: _Best) -> bool:
        """Whether it is time for steps without drafts, which those with drafts are compared with."""
        self._run += 1
        longest = max(_SHORTEST_RUN, round((best.rate - 1) / _COMPARING)) << self._missed
        if self._run < min(longest, _LONGEST_RUN):
            return False
        self._run, self._missed, self._rest = 0, self._missed + 1, _WARM - 1
        return True

    def _begin_rest(self, most: int) -> None:
        self._rest = min(self._next_rest, most)
        self._next_rest = min(2 * self._rest, most)

    def _best(self, chances: Sequence[Chances], num_rows: int) -> _Best:
        """As many of these drafts, the likeliest, as make the most tokens a second; none where they do not make clearly more than
        no drafts."""
        best, best_rate = 0, _PROVED if self._is_worth_it else self._margin
        made = list(accumulate(sorted(chain.from_iterable(chances), reverse=True), initial=float(num_rows)))
        filled = self._filled_up(num_rows)
        most = min(len(made) - 1, max(_FIRST, filled.drafts[0], int(3 * self.acceptance.judged)))
        if most:
            for drafts, cost in zip(filled.drafts, self.costs.at(num_rows, filled.places), strict=True):
                taken = min(drafts, most)
                rate = made[taken] / (cost * num_rows)
                if rate > best_rate:
                    best, best_rate = taken, rate
                if taken == most:
                    break
        return _Best(best, best_rate)

    def _filled_up(self, num_rows: int) -> _Filled:
        """The sizes to which steps of so many rows with drafts are filled up."""
        filled = self._filled.get(num_rows)
        if filled is None:
            drafts, most = [0], num_rows * self.depths[-1]
            while drafts[-1] < most:
                drafts.append(self.fill(num_rows, num_rows + drafts[-1] + 1) - num_rows)
            filled = _Filled(drafts[1:], [self.costs.place(number / num_rows) for number in drafts[1:]])
            self._filled[num_rows] = filled
        return filled

    def _rate(self, num_rows: int, drafts: int, made: float) -> float:
        """Tokens a second of a step with so many drafts that makes so many tokens, as a multiple of those without drafts."""
        return made / (self.costs.of(num_rows, drafts / num_rows) * num_rows)


def _likeliest(chances: Sequence[Chances], number: int) -> list[int]:
    """How many drafts of each row are among so many likeliest ones; of equally likely ones those of the first rows."""
    each = [len(of) for of in chances]
    if number == sum(each):
        return each
    owners = [at for at, has in enumerate(each) for _ in range(has)]
    every, each = list(chain.from_iterable(chances)), [0] * len(chances)
    for draft in sorted(range(len(every)), key=every.__getitem__, reverse=True)[:number]:
        each[owners[draft]] += 1
    return each


def depths(num_drafts: int) -> list[int]:
    """The numbers of drafts that are chosen from, up to `num_drafts`."""
    return sorted({0, *(2**power for power in range(6) if 2**power < num_drafts), num_drafts})
