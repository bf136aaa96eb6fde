"""What the steps of a core have been since its start: how long, how large, and what they cost by arithmetic."""

from bisect import bisect_left

import numpy as np

from penstock.engine.core.measure.step_cost import step_cost
from penstock.engine.core.plan import Int32, Int64, StepPlan, StepResult
from penstock.engine.cost import ModelCost, StepCost
from penstock.engine.roofline import Ceilings, floor_s
from penstock.engine.stats import Buckets, DraftStats, GraphSteps, Roofline, StepStats

SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 30),
)
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class StepMeter:
    """Totals of a core's steps.

    Args:
        model: The model's shape; None: its cost is not known.
        ceilings: The device's limits; None: not measured.
        num_drafts: Most drafts of a row; 0: there are none.
    """

    def __init__(self, model: ModelCost | None, ceilings: Ceilings | None = None, num_drafts: int = 0) -> None:
        self._model = model
        self._ceilings = ceilings
        self._floor_s = 0.0
        self._seconds = [0] * (len(SECONDS) + 1)
        self._tokens = [0] * (len(TOKENS) + 1)
        self._seconds_sum = 0.0
        self._tokens_sum = 0
        self._sampled = 0
        self._not_finite = 0
        self._cost = StepCost()
        self._graphs: dict[tuple[str, str], list[int]] = {}
        self._drafted, self._accepted = np.zeros(num_drafts + 1, np.int64), np.zeros(num_drafts + 1, np.int64)
        """[1 + num_drafts]: rows of steps with drafts by how many were verified, and by how many were accepted."""

    def submitted(self, plan: StepPlan, ends: Int32) -> None:
        """A plan goes to the runner; `ends`, [r]: how many tokens of each row are computed after it."""
        if self._model is not None:
            cost = step_cost(self._model, plan.num_new_tokens, ends, int(np.count_nonzero(plan.samples)))
            self._cost += cost
            if self._ceilings is not None:
                self._floor_s += floor_s(cost, self._ceilings)

    def retired(self, plan: StepPlan, result: StepResult, seconds: float, tokens: int) -> None:
        """A step of so many tokens has ended."""
        self._seconds[bisect_left(SECONDS, seconds)] += 1
        self._tokens[bisect_left(TOKENS, tokens)] += 1
        self._seconds_sum += seconds
        self._tokens_sum += tokens
        self._sampled += int(np.count_nonzero(plan.samples)) if result.pooled is None else 0
        self._not_finite += result.num_not_finite
        if len(plan.num_drafts) and len(self._drafted) > 1:
            self._take_drafts(plan.num_drafts, result.counts)
        if (graph := result.graph) is not None:
            counts = self._graphs.setdefault((graph.mode, graph.reason), [0, 0, 0])
            counts[0] += 1
            counts[1] += graph.num_tokens
            counts[2] += graph.num_padded_tokens - graph.num_tokens

    def _take_drafts(self, drafted: Int32, counts: Int32) -> None:
        sizes, most = len(self._drafted), len(self._drafted) - 1
        judged = np.where(counts > 0, np.minimum(drafted, most), 0)  # a guide may force more than there are drafts
        self._drafted += np.bincount(judged, minlength=sizes)
        self._accepted += np.bincount(np.minimum(np.maximum(counts - 1, 0), judged), minlength=sizes)

    def stats(self) -> StepStats:
        """Return the totals since the start."""
        return StepStats(
            seconds=Buckets(list(self._seconds), self._seconds_sum),
            tokens=Buckets(list(self._tokens), self._tokens_sum),
            sampled_tokens=self._sampled,
            not_finite=self._not_finite,
            cost=None if self._model is None else self._cost,
            roofline=None if self._ceilings is None or self._model is None else Roofline(self._ceilings, self._floor_s),
            drafts=self._draft_stats(),
            graphs=[GraphSteps(mode, reason, *counts) for (mode, reason), counts in self._graphs.items()],
        )

    def _draft_stats(self) -> DraftStats | None:
        if len(self._drafted) == 1:
            return None
        drafted, accepted = (_at_least(rows) for rows in (self._drafted, self._accepted))
        return DraftStats(drafted[0], drafted, accepted)


def _at_least(rows: Int64) -> list[int]:
    """From the numbers of rows that had none, one, two, ...: how many had at least one, two, ..."""
    return rows[:0:-1].cumsum()[::-1].tolist()
