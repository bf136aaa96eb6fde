"""The requests in a runner's rows: their tokens and blocks, why some are refused, and what they ask of the sampler."""

from collections.abc import Sequence

import numpy as np
import torch

from penstock.engine.cache.layout import KVGroup
from penstock.engine.config import LogprobsMode
from penstock.engine.core.plan import Int32, StepPlan
from penstock.engine.core.row_table import RowTable
from penstock.engine.runner.device.runtime import Copies
from penstock.engine.runner.refusals import Refusals
from penstock.engine.runner.sampler.adjustments import Adjustments
from penstock.engine.runner.sampler.choice import Chooser, Choosing
from penstock.engine.runner.sampler.custom import GuardedProcessor
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.runner.sampler.sampler import Sampler
from penstock.engine.runner.sampler.stage import Tokens
from penstock.engine.runner.verification import PlannedDrafts


class Requests:
    """Changes only by what a plan says.

    Args:
        max_num_seqs: Rows.
        max_model_len: Tokens of a row at most.
        groups: The KV groups.
        vocab_size: Tokens are checked against it at admission.
        copies: To the device.
        sampler: Of the same rows.
        token_ids: [at least rows, max_model_len]: where the device has their tokens; None: where the host has them.
        mode: What logprobs are of.
        processors: Logits processors of one's own.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        groups: Sequence[KVGroup],
        vocab_size: int,
        copies: Copies,
        sampler: Sampler,
        token_ids: torch.Tensor | None = None,
        mode: LogprobsMode = "raw_logprobs",
        processors: Sequence[GuardedProcessor] = (),
    ) -> None:
        self.rows = RowTable(max_num_seqs, max_model_len, [group.block_size for group in groups])
        self.sampler, self.refusals, self.vocab_size = sampler, Refusals(vocab_size), vocab_size
        known = self.rows.token_ids
        tokens = Tokens(torch.from_numpy(known) if token_ids is None else token_ids, known)
        adjustments = Adjustments(copies, sampler.ops, max_num_seqs, vocab_size, tokens, processors)
        self.chooser = Chooser(copies, sampler, adjustments, max_num_seqs, mode)
        self._places = np.arange(len(sampler.buffers.result))

    def take_in(self, plan: StepPlan) -> Int32:
        """Brings the rows to the state after a plan, and hears what its new requests ask for; returns what `RowTable.apply` does.

        The sampler keeps the new parameters until `take_changes`.
        """
        starts = self.rows.apply(plan)
        self.refusals.release(plan.released)
        for admission in plan.admissions:
            row, count = admission.row, len(admission.token_ids)
            known = self.rows.token_ids[row, :count]
            # First of all: what is outside the vocabulary is made harmless.
            self.refusals.admit(row, known)
            self.chooser.admit(row, known, admission.num_prompt_tokens, admission.sampling, admission.guided)
        return starts

    def write_drafts(self, plan: StepPlan, starts: Int32, drafts: PlannedDrafts) -> tuple[Int32, Int32, Int32]:
        """Puts drafts in the places that they guess, for the step to read.

        Args:
            plan: The step's.
            starts: [r]: as of `take_in`.
            drafts: The plan's.

        Returns:
            [d] each: the request row, the position and the token of each draft.
        """
        # Rows with drafts sample, and the last choice of each is no draft's.
        of = drafts.back.nonzero()[0]
        owners, places = drafts.of[of], drafts.place[of]
        rows, positions = plan.rows[owners], (starts + plan.num_new_tokens - plan.num_drafts)[owners] + places
        there = drafts.ids[owners, places]
        # In place of a draft that is missing, or that the model does not know, any token will do: it is not accepted.
        tokens = np.where(there.view(np.uint32) < self.vocab_size, there, np.int32(0))
        self.rows.token_ids[rows, positions] = tokens
        return rows, positions.astype(np.int32), tokens

    def choosing(self, plan: StepPlan, drafts: PlannedDrafts | None = None, *, each_row: bool = False) -> Choosing:
        """The rows of logits that count: one for each choice of the step.

        Args:
            plan: The step's.
            drafts: The plan's; None: there are none.
            each_row: Whether a step without drafts has logits for all of its rows, and not only for those that sample.
        """
        which, back = (plan.samples.nonzero()[0], np.int32(0)) if drafts is None else (drafts.of, drafts.back)
        of = plan.rows[which]
        at = which if each_row and drafts is None else self._places[: len(which)]
        return Choosing(at, which.astype(np.int32), self.logits_rows(of, self.rows.num_computed[of] - back))

    def logits_rows(self, request_rows: Int32, positions: Int32) -> LogitsRows:
        """Choices of tokens at these positions, [m], of requests in these rows, [m]."""
        return LogitsRows(request_rows, positions, self.rows.num_prompt_tokens, self.rows.token_ids)
