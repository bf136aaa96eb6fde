"""The rows that the runner holds between steps, and the tensors of a step derived from them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.engine.attention.context import GroupInputs
from penstock.engine.cache.layout import KVGroup
from penstock.engine.core.plan import Int32, StepPlan
from penstock.engine.core.row_table import RowTable
from penstock.engine.runner.refusals import Refusals
from penstock.engine.runner.sampler.adjustments import Adjustments
from penstock.engine.runner.sampler.custom import GuardedProcessor
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.runner.sampler.params import SamplingBatch, SamplingTable
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
        self.refusals = Refusals(vocab_size)
        self._groups, self._max_model_len = groups, max_model_len
        self._places = np.arange(max_num_seqs + 1, dtype=np.int32)
        self._places.flags.writeable = False

    def apply(self, plan: StepPlan) -> StepInputs:
        """Takes in a plan and returns its step."""
        starts = self.rows.apply(plan)
        self.refusals.release(plan.released)
        for admission in plan.admissions:
            row, count = admission.row, len(admission.token_ids)
            self.sampling.admit(row, admission.sampling)
            known = self.rows.token_ids[row, :count]
            self.refusals.admit(row, known)
            self.adjustments.admit(row, known, admission.num_prompt_tokens, admission.sampling)
        return self._inputs(plan, starts)

    def sampling_batch(self, rows: LogitsRows) -> SamplingBatch:
        """Parameters of the step's m logits rows."""
        return self.sampling.batch(rows.request_rows, rows.positions)

    def logits_rows(self, plan: StepPlan, inputs: StepInputs) -> LogitsRows:
        """What the step's m logits rows stand for."""
        rows = plan.rows[inputs.sampled_rows]
        return LogitsRows(rows, inputs.sampled_positions, self.rows.num_prompt_tokens[rows], self.rows.token_ids)

    def write_sampled(self, rows: LogitsRows, token_ids: Int32) -> None:
        """Puts sampled tokens, [m], where the next step finds them."""
        # A row whose context is full may sample once more before anybody knows that it ended; that token has no place.
        fits = rows.positions < self._max_model_len
        if np.count_nonzero(fits) == len(fits):
            self.rows.write_sampled(rows.request_rows, rows.positions, token_ids)
        else:
            self.rows.write_sampled(rows.request_rows[fits], rows.positions[fits], token_ids[fits])
        self.adjustments.observe(rows, token_ids)

    def _inputs(self, plan: StepPlan, starts: Int32) -> StepInputs:
        count, seq_lens = len(plan.rows), starts + plan.num_new_tokens
        # A token each, as in most steps: a small model's takes hardly longer than what is in the other branch.
        if np.count_nonzero(plan.num_new_tokens == 1) == count:
            query_start_loc, request, rows, positions = self._places[: count + 1], self._places[:count], plan.rows, starts
        else:
            query_start_loc = np.concatenate(([0], np.cumsum(plan.num_new_tokens))).astype(np.int32)
            request = np.repeat(np.arange(count), plan.num_new_tokens)
            rows = plan.rows[request]
            positions = starts[request] + np.arange(query_start_loc[-1]) - query_start_loc[request]
        longest = int(seq_lens.max(initial=0))
        groups: list[GroupInputs] = []
        for group, tables in zip(self._groups, self.rows.block_tables, strict=True):
            size = group.block_size
            table = tables[plan.rows, : -(-longest // size)]
            blocks, offsets = np.divmod(positions, size)
            slots = table[request, blocks].astype(np.int64) * size + offsets
            groups.append(GroupInputs(torch.from_numpy(slots), PagedBatch(size, query_start_loc, seq_lens, table, group.window)))
        sampled = plan.samples.nonzero()[0].astype(np.int32)
        return StepInputs(
            input_ids=torch.from_numpy(self.rows.token_ids[rows, positions].astype(np.int64)),
            positions=torch.from_numpy(positions.astype(np.int64)),
            groups=groups,
            logits_indices=torch.from_numpy(query_start_loc[1:][sampled].astype(np.int64) - 1),
            sampled_rows=sampled,
            sampled_positions=seq_lens[sampled],
        )
