"""Drafts of a device's rows: once the host has the tokens of a step, it looks up what may follow them."""

from typing import NamedTuple

import msgspec
import numpy as np

from penstock.engine.core.plan import Int32, StepResult
from penstock.engine.runner.own_drafts import OwnDrafts
from penstock.engine.runner.pending import PendingStep


class ProposingStep(NamedTuple):
    """A step whose result brings the drafts of the next one."""

    pending: PendingStep
    drafts: OwnDrafts
    starts: Int32
    """[r]: the position of each row's first token."""

    def result(self) -> StepResult:
        """Waits for it, as `PendingStep.result`.

        A plan may have followed meanwhile, without drafts. Its rows are told of drafts, too, though theirs come to nothing: the
        next plan then waits for better ones.
        """
        result, (plan, rows) = self.pending.result(), (self.pending.plan, self.pending.rows)
        counts = np.where(self.pending.suspect.live, result.counts, np.int32(0))
        known = rows.write_result(plan, self.starts, result.token_ids, counts)
        drafts = self.drafts.propose(plan, None, counts, rows, known)
        return result if drafts is None else msgspec.structs.replace(result, drafts=drafts)
