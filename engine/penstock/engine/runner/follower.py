"""What a pipeline stage does in place of sampling: it waits for the tokens that the last stage has sampled."""

from collections import deque
from typing import NamedTuple

import numpy as np

from penstock.engine.core.plan import Int32, SampledTokens, StepPlan
from penstock.engine.core.row_table import RowTable
from penstock.engine.runner.not_finite import Suspect

_PAD = -1


class _Passed(NamedTuple):
    plan: StepPlan
    starts: Int32
    suspect: Suspect
    """Knows whose rows they were."""


class Follower:
    """The steps of an earlier stage.

    Args:
        max_num_seqs: Rows.
        num_drafts: Of a row at most.
    """

    def __init__(self, max_num_seqs: int, num_drafts: int) -> None:
        self.drafts: Int32 = np.full((max_num_seqs, num_drafts), _PAD, np.int32)
        """[rows, K]: of each row's next step, -1 pads."""
        self._passed = deque[_Passed]()

    def passed(self, plan: StepPlan, starts: Int32, suspect: Suspect) -> None:
        """A step has been passed on. `starts` is [r]: the position of each row's first token."""
        for admission in plan.admissions:
            self.drafts[admission.row] = _PAD
        self._passed.append(_Passed(plan, starts, suspect))

    def take(self, sampled: SampledTokens, rows: RowTable) -> None:
        """Brings the rows to the state after a step, of which the last stage tells. Steps before it of which it does not tell
        have failed, and their requests have ended."""
        step = self._passed.popleft()
        while step.plan.step_id != sampled.step_id:
            step = self._passed.popleft()
        plan, live = step.plan, step.suspect.live
        rows.write_result(plan, step.starts, sampled.token_ids, np.where(live, sampled.counts, np.int32(0)))
        if len(plan.num_drafts):
            rows.reject(plan, sampled.counts, live)
        told = plan.rows[live]
        self.drafts[told] = _PAD
        if sampled.drafts is not None:
            self.drafts[told, : sampled.drafts.shape[1]] = sampled.drafts[live]
