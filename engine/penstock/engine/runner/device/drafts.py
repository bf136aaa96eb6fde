"""A step's drafts on a device, where they are compared with what was chosen: the host learns of that later."""

from typing import NamedTuple

import numpy as np
import torch

from penstock.engine.core.plan import StepPlan
from penstock.engine.runner.device.program import Step
from penstock.engine.runner.device.runtime import Copies
from penstock.engine.runner.device.uploads import upload
from penstock.engine.runner.verification import PlannedDrafts
from penstock.kernels.sampling.buffers import Column
from penstock.kernels.step_state.batch import RowState


class StepDrafts(NamedTuple):
    """The m choices of a step of r rows with up to K drafts each."""

    width: int
    """1 + K."""
    of: torch.Tensor
    """[m], int64: index into the plan's rows. This and what follows is on the device."""
    place: torch.Tensor
    """[m], int64: how many of its row's choices come before."""
    back: torch.Tensor
    """[m], int32: how many come after."""
    ids: torch.Tensor
    """[m], int32: the draft that the choice confirms; -1: none does."""
    num_drafts: torch.Tensor
    """[r], int32."""
    logits_indices: torch.Tensor
    """[m], int64: the tokens whose logits the sampler needs."""

    @staticmethod
    def of_plan(copies: Copies, plan: StepPlan, drafts: PlannedDrafts) -> "StepDrafts":
        """Brings a plan's drafts to the device."""
        of, place, back = drafts.of, drafts.place, drafts.back
        indices = np.cumsum(plan.num_new_tokens)[of] - 1 - back
        arrays = (of, place, back, drafts.ids[of, place], plan.num_drafts, indices.astype(np.int64))
        there = upload(copies, *arrays)
        of_there, place_there, back_there, ids, num_drafts, logits_indices = there
        return StepDrafts(drafts.ids.shape[1], of_there, place_there, back_there, ids, num_drafts, logits_indices)

    def positions(self, step: Step) -> torch.Tensor:
        """[m], int32: where in its request each chosen token belongs."""
        return step.inputs.seq_lens.index_select(0, self.of) - self.back

    def commit(self, step: Step, sampled: torch.Tensor, state: RowState) -> None:
        """Keeps what is accepted, and the token after it; moves the rows on as far as that.

        Args:
            step: Whose padding requests, if any, are the last.
            sampled: [m, RESULT].
            state: Changed.
        """
        count = len(self.num_drafts)
        rows, tokens = step.request.rows[:count].long(), sampled[:, Column.TOKEN]
        agree = torch.zeros(len(rows), self.width, dtype=torch.int32, device=tokens.device)
        agree[self.of, self.place] = (tokens == self.ids).int()
        accepted = agree.cumprod(1).sum(1)
        positions = self.positions(step).long()
        writes = (accepted[self.of] >= self.place) & (positions < state.token_ids.shape[1])
        # What is not kept writes 0 to a place of nobody.
        owners, places = torch.where(writes, rows[self.of], state.spare_row), torch.where(writes, positions, 0)
        state.token_ids[owners, places] = torch.where(writes, tokens, 0)
        state.num_computed[rows] = step.inputs.seq_lens[:count] - (self.num_drafts - accepted).int()
