"""All canaries that are judged: takes in what the gateways count, and knows where each stands."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.api.fleet import PoolsView
from penstock.operator.canary.course import Course, Standing, after, begin
from penstock.operator.canary.judgement import compare
from penstock.operator.canary.tally import Tally, tally
from penstock.operator.events import timestamp

log = logging.getLogger(__name__)


FORGET_S = 600.0
"""Gateway processes that have not answered for so long are gone."""


@dataclass(frozen=True)
class _Counted:
    at: float
    models: Mapping[str, Tally]


@dataclass
class _Trial:
    """One canary in its present window."""

    course: Course
    standing: Standing
    began: float
    canary: Tally
    stable: Tally
    told: int = 0
    """Windows that the standing already covers."""

    def again(self, now: float) -> None:
        """A new window."""
        self.began, self.canary, self.stable, self.told = now, Tally(), Tally(), 0


class Judges:
    """Compares canaries with the models whose traffic they share.

    Args:
        changed: Told the id of a canary (`namespace/name`) that stands elsewhere than before.
        clock: Monotonic seconds.
    """

    def __init__(self, changed: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._changed = changed
        self._clock = clock
        self._trials: dict[str, _Trial] = {}
        self._counted: dict[str, _Counted] = {}
        """By epoch, the counts in the last answer of each gateway process."""

    def follow(self, model: str, course: Course | None, last: Standing | None) -> Standing | None:
        """Judge a model on this course. A changed course restarts the judgement.

        Args:
            model: `namespace/name`.
            course: None: the canary is not judged, or no longer.
            last: The standing that an earlier operator process wrote.
        """
        if course is None:
            self._trials.pop(model, None)
            return None
        trial = self._trials.get(model)
        if trial is None or trial.course.judged != course.judged:
            standing = last if last is not None and last.judged == course.judged else begin(course, timestamp())
            trial = self._trials[model] = _Trial(course, standing, self._clock(), Tally(), Tally())
        return trial.standing

    def told(self, views: Sequence[PoolsView], asked: int) -> None:
        """Takes in what those of `asked` gateways said that answered."""
        grown, mains = self._grown(views)
        for model, trial in self._trials.items():
            main = mains.get(model)
            if main is None:
                continue
            trial.canary += grown.get(model, Tally())
            trial.stable += grown.get(main, Tally())
            self._judge(model, trial)

    def _grown(self, views: Sequence[PoolsView]) -> tuple[dict[str, Tally], dict[str, str]]:
        """What was counted since the last look, and whose canary each is."""
        grown: dict[str, Tally] = {}
        mains: dict[str, str] = {}
        now = self._clock()
        for view in views:
            before = self._counted.get(view.epoch)
            counted = {outcomes.model: tally(outcomes) for outcomes in view.models}
            mains |= {outcomes.model: outcomes.canary_of for outcomes in view.models if outcomes.canary_of is not None}
            self._counted[view.epoch] = _Counted(now, counted)
            if before is None:
                continue  # nobody knows when that was
            for model, its in counted.items():
                grown[model] = grown.get(model, Tally()) + its.since(before.models.get(model, Tally()))
        self._counted = {epoch: one for epoch, one in self._counted.items() if now - one.at < FORGET_S}
        return grown, mains

    def _judge(self, model: str, trial: _Trial) -> None:
        now = self._clock()
        windows = int((now - trial.began) / trial.course.window_s)
        judgement = compare(trial.canary, trial.stable, trial.course.limits)
        if judgement.outcome == "Open" and windows == trial.told:
            return
        old = trial.standing
        trial.standing = after(old, trial.course, judgement, windows, timestamp())
        trial.told = windows
        if windows and judgement.outcome == "Good":
            trial.again(now)
        if trial.standing != old:
            log.info("canary %s: %s at %d %%: %s", model, trial.standing.verdict, trial.standing.weight, trial.standing.reason)
            self._changed(model)
