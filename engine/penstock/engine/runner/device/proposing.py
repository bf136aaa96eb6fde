"""Drafts of a device's rows: once the host has the tokens of a step, it has the proposer guess what may follow them."""

from typing import NamedTuple

import msgspec
import numpy as np
import torch

from penstock.engine.core.plan import Int32, StepResult
from penstock.engine.runner.input_batch import StepArrays
from penstock.engine.runner.own_drafts import OwnDrafts
from penstock.engine.runner.pending import PendingStep


class ProposingStep(NamedTuple):
    """A step whose result brings the drafts of the next one."""

    pending: PendingStep
    drafts: OwnDrafts
    starts: Int32
    """[r]: the position of each row's first token."""
    arrays: StepArrays | None = None
    """Of a proposer with weights, which must know where the step's tokens stand; None: it looks at text alone."""

    @torch.inference_mode()
    def result(self) -> StepResult:
        """Waits for it, as `PendingStep.result`.

        A plan may have followed meanwhile, without drafts. Its rows are told of drafts, too, though theirs come to nothing: the
        next plan then waits for better ones.
        """
        result, (plan, rows) = self.pending.result(), (self.pending.plan, self.pending.rows)
        counts = np.where(self.pending.suspect.live, result.counts, np.int32(0))
        known = rows.write_result(plan, self.starts, result.token_ids, counts)
        with self.pending.runtime.main_stream():
            placed = None if self.arrays is None else self.arrays.place(rows, plan.rows, self.starts, plan.num_new_tokens)
            drafts = self.drafts.propose(plan, placed, counts, rows, known)
        return result if drafts is None else msgspec.structs.replace(result, drafts=drafts)
