"""The drafts that a runner keeps for its rows from one step to the next."""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from penstock.engine.config import SchedulerConfig, SpeculativeConfig
from penstock.engine.core.plan import Bool, Int32, StepPlan
from penstock.engine.core.row_table import RowTable, first_places
from penstock.engine.runner.draft_sampler import DraftSampler
from penstock.engine.runner.input_batch import Placed
from penstock.engine.runner.sampler.choice import Drawn
from penstock.engine.runner.verification import PlannedDrafts
from penstock.engine.spec.costs import Timing, knots
from penstock.engine.spec.depth import HIGH_HOPE, HIGH_MARGIN, HOPE, MARGIN, DraftDepth, depths
from penstock.engine.spec.filling import Filling, unfilled
from penstock.engine.spec.proposer import Proposer

log = logging.getLogger(__name__)

_PAD = -1
_REPEATS, _MOST_REPEATS = 3, 8
_REPEATS_S = 0.3
"""For short steps, which others disturb most, there are more repeats, up to about so many seconds of them."""
_PATIENCE_S = 0.5
"""A step that takes longer is the largest that is measured."""


class Clock(NamedTuple):
    """How a runner measures time."""

    now: Callable[[], float]
    """Seconds, of this rank."""
    agree: Callable[[float], float]
    """Rank 0's number, on all ranks."""


class _Begun(NamedTuple):
    """A step of decodes alone."""

    at: float
    rows: int
    drafts: float
    """Of a row, on average."""
    guessed_s: float
    """Seconds that the proposer took for these drafts, before the step began."""


class OwnDrafts:
    """Proposals, as many of them as pay.

    Args:
        config: The method and its limits.
        proposer: Whose drafts they are.
        timings: As `DraftDepth` takes them.
        max_num_seqs: Rows.
        vocab_size: A draft outside is none.
        clock: Compares steps.
        apart: Whether the host has tokens later than the rows count them, and says how many it has.
        sampler: Of a proposer that may draw its drafts; None: it never does.
        fill: How steps with drafts are filled up.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        proposer: Proposer,
        timings: Sequence[Timing],
        max_num_seqs: int,
        vocab_size: int,
        clock: Clock,
        sampler: DraftSampler | None = None,
        fill: Filling = unfilled,
        *,
        apart: bool = False,
    ) -> None:
        self._proposer, self._vocab_size, self._clock, self._sampler = proposer, vocab_size, clock, sampler
        self._looks_up = proposer.looks_up
        hope, margin = (HOPE, MARGIN) if self._looks_up else (HIGH_HOPE, HIGH_MARGIN)
        self._depth = DraftDepth(max_num_seqs, config.num_speculative_tokens, timings, hope, fill, margin)
        self.drafts: Int32 = np.full((max_num_seqs, config.num_speculative_tokens), _PAD, np.int32)
        """[rows, K]: of each row's next step, -1 pads."""
        self._places = np.arange(config.num_speculative_tokens)
        self._num_proposed: Int32 = np.zeros(max_num_seqs, np.int32)
        """[rows]: how many the proposer had. What stands behind those that are kept only fills a step up."""
        self._has_any = False
        """Whether `drafts` has a draft."""
        self._num_own: Int32 = np.zeros(max_num_seqs, np.int32)
        """[rows]: how many of `drafts` are the proposer's; what follows them fills a step up."""
        self._wanted: Bool = np.ones(max_num_seqs, np.bool_)
        """[rows]: whether the request lets itself be drafted for."""
        self._limits: Int32 = np.zeros(max_num_seqs, np.int32)
        """[rows]: tokens at which the request ends."""
        self._known: Int32 | None = np.zeros(max_num_seqs, np.int32) if apart else None
        """[rows]: tokens of each row that the host has; None: as the rows count them."""
        self._behind: Bool = np.zeros(max_num_seqs, np.bool_)
        """[rows]: of whose tokens a proposer that reads all steps has not read some; there are no more drafts for the request."""
        self._has_skipped = False
        """Whether the proposer has yet to be told of such rows."""
        self._last: _Begun | None = None
        """The last step; None: nothing is learned from it."""
        self._alone = False
        """Whether it is known to have been one of decodes alone."""
        self._guess_s: float | None = None
        """Seconds that the proposer has taken since the last step began; None: it was not asked."""

    def apply(self, plan: StepPlan, rows: RowTable) -> None:
        """Takes in who leaves and who comes, before the plan is applied to the rows."""
        for row in plan.released.tolist():
            self._proposer.ended(rows.token_ids[row, rows.num_prompt_tokens[row] : self._tokens(rows)[row]])
            if self._sampler is not None:
                self._sampler.release(row)
        for admission in plan.admissions:
            self._depth.admit(admission.row)
            self._proposer.begins(admission.row, admission.num_computed_tokens)
            self.drafts[admission.row], self._num_own[admission.row] = _PAD, 0
            self._behind[admission.row] = False
            limit = admission.num_prompt_tokens + admission.sampling.max_tokens
            self._limits[admission.row] = min(limit, rows.token_ids.shape[1])
            if self._known is not None:
                self._known[admission.row] = len(admission.token_ids)
            if self._sampler is not None:
                self._sampler.admit(admission.row, admission.sampling)
            self._wanted[admission.row] = admission.sampling.speculative_decoding
        self._learn(plan)

    def _learn(self, plan: StepPlan) -> None:
        """Takes in how long the last step took, now that the next one begins."""
        last, guess_s, alone, now = self._last, self._guess_s, self._alone, None
        self._last = self._guess_s = None
        if last is not None:
            now = self._clock.now()
            spent_s = now - last.at - (guess_s or 0.0)
            self._depth.observe_step(last.rows, last.drafts, self._clock.agree(spent_s + last.guessed_s))
            if guess_s is not None and not last.drafts and not self._looks_up:
                self._depth.followed(last.rows, self._clock.agree(guess_s))
        rows, verified = len(plan.rows), sum(plan.num_drafts.tolist()) if len(plan.num_drafts) else 0
        if (self._looks_up or verified or self._depth.idle) and not self._depth.learns_from(rows, verified):
            self._alone = not plan.admissions  # a guess that is good enough: each look at arrays shows in a small model's step
            return
        self._alone = 0 < rows == int(plan.num_new_tokens.sum()) - verified
        # Behind a prompt the caches are cold, and a guess that came with one had the prompt to read as well.
        if self._alone and alone:
            guessed_s = guess_s or 0.0 if verified else 0.0
            self._last = _Begun(self._clock.now() if now is None else now, rows, verified / rows, guessed_s)

    def drawn(self, plan: StepPlan, drafts: PlannedDrafts) -> Drawn | None:
        """What the sampler must know of a step's drafts; None: none was drawn."""
        if self._sampler is None or not self._sampler.draws.any():
            return None
        given = drafts.given
        judged = first_places(given.shape[1], np.minimum(self._num_own[plan.rows], plan.num_drafts))
        judged[plan.draft_rows] = False  # these are a guide's
        judged &= given & self._sampler.draws[plan.rows][:, None]
        owners, places = judged.nonzero()
        if not len(owners):
            return None
        at = np.cumsum(given).reshape(given.shape) - 1
        return Drawn(
            at[owners, places], drafts.ids[owners, places], self._sampler.left_of(plan.rows[owners], places.astype(np.int32))
        )

    def _tokens(self, rows: RowTable) -> Int32:
        """[rows]: tokens of each row that the host has."""
        return rows.num_tokens if self._known is None else self._known

    def propose(
        self, plan: StepPlan, step: Placed | None, counts: Int32, rows: RowTable, known: Int32 | None = None
    ) -> Int32 | None:
        """Makes the drafts of the next step, once the tokens of this one are in their rows.

        Args:
            plan: The step's.
            step: Where the tokens stand that the model has read; None: the proposer looks at text alone.
            counts: [r]: new tokens of each row; 0 where it does not sample, has an error, or has come to another request since.
            rows: With these tokens.
            known: [r]: how many tokens each row with new ones has by now; None: as the rows count them.

        Returns:
            [r, K]: -1 pads; None: there are none.
        """
        rests = self._depth.rests(len(plan.rows))
        # A small model's step takes so little time that each operation on arrays shows.
        if rests and known is None and not (self._has_any or len(plan.num_drafts)):
            if self._looks_up:
                return None
            if self._depth.idle:
                self._behind[plan.rows] = self._has_skipped = True
                return None
        # Arrays are counted and not summed up or asked for any of theirs, which takes NumPy several times as long.
        goes_on = counts > 0
        if known is not None and self._known is not None:
            self._known[plan.rows[goes_on]] = known[goes_on]
        if len(plan.num_drafts):
            self._judge(plan, goes_on, counts)
        # The host knows of no drafts but those that it is told of: masks are for these alone.
        if self._has_any:
            self.drafts[plan.rows], self._num_own[plan.rows] = _PAD, 0
            self._has_any = np.count_nonzero(self.drafts[:, 0] != _PAD) > 0
        asked, looks_up = goes_on & self._wanted[plan.rows], self._looks_up
        if looks_up and (rests or not np.count_nonzero(asked)):
            return None
        began = self._clock.now()
        drafts = self._looked_up(plan, rows, asked) if looks_up else self._guessed(plan, rows, step, asked, rests=rests)
        self._guess_s = self._clock.now() - began
        if looks_up and drafts is None:
            self._depth.in_vain(len(plan.rows), self._clock.agree(self._guess_s))
        return drafts

    def _judge(self, plan: StepPlan, goes_on: Bool, counts: Int32) -> None:
        """Takes in how many of a step's drafts were accepted; arguments as of `propose`."""
        own = goes_on
        if len(plan.draft_rows):
            own = goes_on.copy()
            own[plan.draft_rows] = False  # what a guide forces says nothing of the proposer
        of, verified = plan.rows[own], plan.num_drafts[own]
        drafted = np.minimum(verified, self._num_proposed[of])
        accepted = np.minimum(counts[own] - 1, drafted)
        self._depth.observe(of, drafted, accepted, len(plan.rows) - len(of), sum(verified.tolist()))

    def _looked_up(self, plan: StepPlan, rows: RowTable, asked: Bool) -> Int32 | None:
        """As `propose`, of a proposer that looks drafts up: what it finds decides whether they pay."""
        of = plan.rows[asked]
        known = self._tokens(rows)[of]
        proposed = self._proposed(rows, of, known, self.drafts.shape[1])
        if proposed is None:
            self._num_proposed[of] = 0
            self._depth.found_nothing(of)
            return None
        found, counts = proposed
        self._num_proposed[of] = counts
        room = self._room(of, known)
        each = self._depth.choose(of, counts, np.minimum(counts, room), len(plan.rows) - len(of))
        return None if each is None else self._kept(plan, of, found, np.array(each, np.int32), room, rows)

    def _guessed(self, plan: StepPlan, rows: RowTable, step: Placed | None, asked: Bool, *, rests: bool) -> Int32 | None:
        """As `propose`, of a proposer that takes its time: it is asked only for what would pay."""
        if rests and self._depth.idle:
            self._behind[plan.rows] = True
        behind = self._behind[plan.rows]
        if behind.all():
            self._has_skipped = True
            return None
        if self._has_skipped:
            self._proposer.skipped(rows, self._behind.nonzero()[0].astype(np.int32))
            self._has_skipped = False
        asked &= ~behind
        of = plan.rows[asked]
        most = self._depth.most(of, len(plan.rows) - len(of)) if len(of) and not rests else 0
        if not self._follow(rows, plan, step, asked if most else np.zeros_like(asked)) or not most:
            return None
        known = self._tokens(rows)[of]
        proposed = self._proposed(rows, of, known, most)
        if proposed is None:
            return None
        found, counts = proposed
        self._num_proposed[of] = counts
        room = self._room(of, known)
        return self._kept(plan, of, found, np.minimum(counts, room), room, rows)

    def _proposed(self, rows: RowTable, of: Int32, known: Int32, most: int) -> tuple[Int32, Int32] | None:
        """[m, K]: what the proposer says of the rows `of`, [m], of which so many tokens are `known`, up to the first that is no
        token, and no more than `most`; and [m]: how many that are. None: nothing. A step does without drafts where the proposer
        fails."""
        try:
            drafts = self._proposer.propose(rows, of, known, most)
        except Exception:
            log.exception("no drafts: the proposer failed")
            return None
        fits = drafts.view(np.uint32) < self._vocab_size  # pads are above
        if most < drafts.shape[1]:
            fits[:, most:] = False
        number = np.count_nonzero(fits)
        if not number:
            return None
        if number == fits.size:
            return drafts, np.full(len(of), most, np.int32)
        fits = np.logical_and.accumulate(fits, axis=1)
        return np.where(fits, drafts, np.int32(_PAD)), fits.sum(axis=1, dtype=np.int32)

    def _follow(self, rows: RowTable, plan: StepPlan, step: Placed | None, asked: Bool) -> bool:
        """Lets the proposer take in the step; False: it has failed."""
        if step is None:
            return True
        try:
            self._proposer.follow(rows, plan.rows, step, asked)
        except Exception:
            log.exception("no drafts: the proposer failed")
            return False
        return True

    def _room(self, of: Int32, known: Int32) -> Int32:
        """[m]: drafts that the rows `of`, of which so many tokens are known, have use for: a step gives a token beside them."""
        return np.minimum(np.maximum(self._limits[of] - known - 1, 0), self.drafts.shape[1])

    def _kept(self, plan: StepPlan, of: Int32, found: Int32, each: Int32, room: Int32, rows: RowTable) -> Int32 | None:
        """Keeps so many drafts, `each`, of the rows `of`, which have use for `room`, [m] all three."""
        if not np.count_nonzero(each):
            return None
        found[self._places >= each[:, None]] = _PAD
        self._num_own[of], self._has_any = each, True
        total = len(plan.rows) + sum(each.tolist())
        more = self._depth.fill(len(plan.rows), total) - total
        if more and (free := np.cumsum(room - each))[-1] >= more:
            # What a step is filled up with is a guess like any other.
            ends = each + np.clip(more - free + room - each, 0, room - each)
            last = rows.token_ids[of, self._tokens(rows)[of] - 1]
            found = np.where((self._places >= each[:, None]) & (self._places < ends[:, None]), last[:, None], found)
        self.drafts[of] = found
        return found if len(of) == len(plan.rows) else self.drafts[plan.rows]


def measured_drafts(
    config: SpeculativeConfig,
    proposer: Proposer,
    run: Callable[[int, int], float],
    scheduler: SchedulerConfig,
    vocab_size: int,
    fill: Filling,
    clock: Clock,
    sampler: DraftSampler | None = None,
    *,
    apart: bool = False,
) -> OwnDrafts:
    """Times steps with and without drafts, logs what it finds, and returns drafts that go by it; arguments as of `OwnDrafts` and
    `measure_steps`."""
    rows, most = scheduler.max_num_seqs, config.num_speculative_tokens
    timings = measure_steps(run, min(rows, scheduler.max_num_batched_tokens // (1 + most)), most)
    pairs = zip(*([it for it in timings if it.drafts == drafts] for drafts in (0, most)), strict=True)
    told = ", ".join(f"{after.seconds / before.seconds:.2f} at {before.rows} requests" for before, after in pairs)
    log.info("steps with %d drafts take, as multiple of those without: %s", most, told)
    return OwnDrafts(config, proposer, timings, rows, vocab_size, clock, sampler, fill, apart=apart)


def measure_steps(run: Callable[[int, int], float], max_num_seqs: int, num_drafts: int) -> list[Timing]:
    """Times steps of several numbers of rows, with and without drafts; see `DraftDepth`.

    Args:
        run: Runs a step of so many rows with so many drafts of all of them together; returns its seconds.
        max_num_seqs: Rows at most.
        num_drafts: Drafts of a row at most.
    """
    found: list[Timing] = []
    for size in sorted({min(size, max_num_seqs) for size in (1, 4, 16, 64)}):
        numbers = sorted({round(size * drafts) for drafts in knots(depths(num_drafts))})
        for drafts in numbers:
            run(size, drafts)  # the first runs of a shape do more than the later ones
            run(size, drafts)
        # In turns, so that what else the machine does meanwhile falls on all numbers of drafts alike.
        seconds, spent = dict.fromkeys(numbers, float("inf")), 0.0
        for repeat in range(_MOST_REPEATS):
            for drafts, least in seconds.items():
                took = run(size, drafts)
                seconds[drafts], spent = min(least, took), spent + took
            if repeat + 1 >= _REPEATS and spent >= _REPEATS_S:
                break
        found += [Timing(size, drafts / size, least) for drafts, least in seconds.items()]
        if found[-1].seconds > _PATIENCE_S:
            break
    return found
