"""The rows that the runner holds between steps, and the tensors of a step derived from them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.engine.attention.context import GroupInputs
from penstock.engine.cache.layout import KVGroup
from penstock.engine.core.plan import Int32, StepPlan
from penstock.engine.core.row_table import RowTable
from penstock.engine.runner.prompt_logprobs import PromptRows
from penstock.engine.runner.sampler.adjustments import Adjustments
from penstock.engine.runner.sampler.custom import GuardedProcessor
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.runner.sampler.params import NO_LOGPROBS, SamplingBatch, SamplingTable
from penstock.kernels.paged_attention.batch import PagedBatch


@dataclass(frozen=True)
class StepInputs:
    """A step of n tokens of r requests, m of which sample."""

    input_ids: torch.Tensor
    """[n], int64."""
    positions: torch.Tensor
    """[n], int64."""
    groups: list[GroupInputs]
    """Per KV group, where its layers find and put the tokens."""
    logits_indices: torch.Tensor
    """[m], int64: the tokens whose hidden states go through the LM head."""
    sampled_rows: Int32
    """[m]: indexes into the plan's rows."""
    sampled_positions: Int32
    """[m]: where in its request each sampled token belongs."""


class InputBatch:
    """Changes only by what a plan says: admissions, releases and appended blocks.

    Args:
        max_num_seqs: Rows.
        max_model_len: Tokens of a row at most.
        groups: The KV groups.
        vocab_size: Tokens are checked against it at admission.
        processors: Logits processors of one's own.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        groups: Sequence[KVGroup],
        vocab_size: int,
        processors: Sequence[GuardedProcessor] = (),
    ) -> None:
        self.rows = RowTable(max_num_seqs, max_model_len, [group.block_size for group in groups])
        self.sampling = SamplingTable(max_num_seqs)
        self.adjustments = Adjustments(max_num_seqs, vocab_size, processors)
        self._groups, self._vocab_size, self._max_model_len = groups, vocab_size, max_model_len
        self._refused: dict[int, str] = {}

    def apply(self, plan: StepPlan) -> StepInputs:
        """Takes in a plan and returns its step."""
        starts = self.rows.apply(plan)
        for row in plan.released.tolist():
            self._refused.pop(row, None)
        for admission in plan.admissions:
            row, count = admission.row, len(admission.token_ids)
            self.sampling.admit(row, admission.sampling)
            self._check_tokens(row, count)
            known = self.rows.token_ids[row, :count]
            self.adjustments.admit(row, known, admission.num_prompt_tokens, admission.sampling)
        return self._inputs(plan, starts)

    def refused(self, plan: StepPlan) -> dict[int, str]:
        """Index into the plan's rows → why that request cannot be served."""
        if not self._refused:
            return {}
        return {index: self._refused[row] for index, row in enumerate(plan.rows.tolist()) if row in self._refused}

    def sampling_batch(self, plan: StepPlan, inputs: StepInputs) -> SamplingBatch:
        """Parameters of the step's m logits rows."""
        return self.sampling.batch(plan.rows[inputs.sampled_rows], inputs.sampled_positions)

    def logits_rows(self, plan: StepPlan, inputs: StepInputs) -> LogitsRows:
        """What the step's m logits rows stand for."""
        rows = plan.rows[inputs.sampled_rows]
        return LogitsRows(rows, inputs.sampled_positions, self.rows.num_prompt_tokens[rows], self.rows.token_ids)

    def prompt_rows(self, plan: StepPlan, inputs: StepInputs) -> PromptRows | None:
        """The prompt tokens whose logprobs the step gives; None where there are none."""
        counts = self.sampling.prompt_logprobs[plan.rows]
        if (counts == NO_LOGPROBS).all():
            return None
        request = np.repeat(np.arange(len(plan.rows), dtype=np.int32), plan.num_new_tokens)
        # Each token's logits are about the one after it.
        positions = inputs.positions.numpy().astype(np.int32) + 1
        of_prompt = positions < self.rows.num_prompt_tokens[plan.rows[request]]
        indices = np.flatnonzero(of_prompt & (counts[request] != NO_LOGPROBS))
        if not len(indices):
            return None
        request, positions = request[indices], positions[indices]
        tokens = self.rows.token_ids[plan.rows[request], positions]
        return PromptRows(indices, request, positions, tokens, counts[request])

    def write_sampled(self, plan: StepPlan, inputs: StepInputs, token_ids: Int32) -> None:
        """Puts sampled tokens, [m], where the next step finds them."""
        # A row whose context is full may sample once more before anybody knows that it ended; that token has no place.
        fits = inputs.sampled_positions < self._max_model_len
        rows = plan.rows[inputs.sampled_rows]
        self.rows.write_sampled(rows[fits], inputs.sampled_positions[fits], token_ids[fits])
        self.adjustments.observe(self.logits_rows(plan, inputs), token_ids)

    def _check_tokens(self, row: int, count: int) -> None:
        """Refuses a row with tokens outside the vocabulary, and makes it harmless for the step that it is in."""
        self._refused.pop(row, None)
        tokens = self.rows.token_ids[row, :count]
        outside = (tokens < 0) | (tokens >= self._vocab_size)
        if outside.any():
            first = int(np.argmax(outside))
            self._refused[row] = f"token {tokens[first]} at position {first} is outside the vocabulary of {self._vocab_size}"
            tokens[outside] = 0

    def _inputs(self, plan: StepPlan, starts: Int32) -> StepInputs:
        query_start_loc = np.concatenate(([0], np.cumsum(plan.num_new_tokens))).astype(np.int32)
        request = np.repeat(np.arange(len(plan.rows)), plan.num_new_tokens)
        positions = starts[request] + np.arange(query_start_loc[-1]) - query_start_loc[request]
        seq_lens = starts + plan.num_new_tokens
        groups: list[GroupInputs] = []
        for group, tables in zip(self._groups, self.rows.block_tables, strict=True):
            size = group.block_size
            table = tables[plan.rows, : -(-int(seq_lens.max(initial=0)) // size)]
            slots = table[request, positions // size].astype(np.int64) * size + positions % size
            groups.append(GroupInputs(torch.from_numpy(slots), PagedBatch(size, query_start_loc, seq_lens, table, group.window)))
        sampled = np.flatnonzero(plan.samples).astype(np.int32)
        return StepInputs(
            input_ids=torch.from_numpy(self.rows.token_ids[plan.rows[request], positions].astype(np.int64)),
            positions=torch.from_numpy(positions.astype(np.int64)),
            groups=groups,
            logits_indices=torch.from_numpy(query_start_loc[1:][sampled].astype(np.int64) - 1),
            sampled_rows=sampled,
            sampled_positions=seq_lens[sampled],
        )
