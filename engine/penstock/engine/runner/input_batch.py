"""The tensors of a step on a CPU, derived from its plan and the rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from penstock.engine.attention.context import GroupInputs
from penstock.engine.cache.layout import KVGroup
from penstock.engine.core.plan import NONE, Int32, Int64, StepPlan
from penstock.engine.core.row_table import RowTable
from penstock.engine.runner.verification import PlannedDrafts
from penstock.kernels.paged_attention.batch import PagedBatch

MAX_TAPED_TOKENS = 128
"""Tokens of a step from a tape at most: the arithmetic of more takes far longer than what a tape saves."""


class LazyGroups:
    """The inputs of KV groups, made when they are first asked for: a draft model's are of no use to the target, and the other way
    round.

    Args:
        make: Of a group's number.
    """

    def __init__(self, make: Callable[[int], GroupInputs]) -> None:
        self._make = make
        self._made: dict[int, GroupInputs] = {}

    def __getitem__(self, number: int) -> GroupInputs:
        found = self._made.get(number)
        if found is None:
            found = self._made[number] = self._make(number)
        return found

    def of_layers(self, numbers: Sequence[int], ends: Int32 | None = None) -> list[GroupInputs]:
        """Of layers with these groups' numbers, which see others after them where there are `ends`; see `GroupInputs.seeing`."""
        seen = {number: self[number] if ends is None else self[number].seeing(ends) for number in set(numbers)}
        return [seen[number] for number in numbers]


@dataclass(frozen=True)
class StepInputs:
    """A step of n tokens of r requests, m of which sample; views of `StepArrays`."""

    input_ids: torch.Tensor
    """[n], int64."""
    positions: torch.Tensor
    """[n], int64."""
    groups: LazyGroups
    """Per KV group, where its layers find and put the tokens."""
    logits_indices: torch.Tensor
    """[m], int64: the tokens whose hidden states go through the LM head."""
    is_tapeable: bool
    """Whether it may run from a tape: it has few tokens, and either all of them have logits or all rows have as many. Others have
    so many shapes that few would come again."""
    sampled_rows: Int32
    """[m]: indexes into the plan's rows, a row with drafts as often as it has logits."""
    placed: "Placed"
    """The same step on the host."""


class Placed(NamedTuple):
    """Where the n tokens of r rows stand in a step, and in the cache."""

    rows: Int64
    """[r]."""
    query_start_loc: Int32
    """[r + 1]: where each row's tokens begin."""
    seq_lens: Int32
    """[r]: tokens of each row, with these."""
    token_rows: Int64
    """[n]: the row of each token."""
    positions: Int64
    """[n]: of each token in its row."""
    groups: LazyGroups
    """Per KV group, to be asked for before the rows' blocks change."""
    is_uniform: bool
    """Whether all rows have equally many tokens."""


class StepArrays:
    """Where each step's inputs are written, over those of the last one: a tape that has read them once reads them there again.

    Args:
        max_num_tokens: Of a step at most.
        max_num_seqs: Rows.
        max_model_len: Tokens of a row at most.
        groups: The KV groups.
        max_logits_rows: Of a step at most.
    """

    def __init__(
        self, max_num_tokens: int, max_num_seqs: int, max_model_len: int, groups: Sequence[KVGroup], max_logits_rows: int
    ) -> None:
        self._groups, self.max_num_tokens = groups, max_num_tokens
        self._input_ids, self._positions = np.zeros(max_num_tokens, np.int64), np.zeros(max_num_tokens, np.int64)
        self._slots = [np.zeros(max_num_tokens, np.int64) for _ in groups]
        self._tables = [np.zeros((max_num_seqs, -(-max_model_len // group.block_size)), np.int32) for group in groups]
        self._seq_lens, self._logits_indices = np.zeros(max_num_seqs, np.int32), np.zeros(max_logits_rows, np.int64)
        self._places = np.arange(max_num_seqs + 1)
        self._query_start_loc = np.zeros(max_num_seqs + 1, np.int32)

    def place(self, table: RowTable, rows: Int32 | Int64, starts: Int32 | Int64, counts: Int32) -> Placed:
        """Finds the slots of tokens in the cache.

        Args:
            table: Has the rows' blocks.
            rows: [r].
            starts: [r]: the position of each row's first token.
            counts: [r]: tokens of each row.
        """
        count, total = len(rows), int(counts.sum())
        # In the type that numpy indexes with: it converts any other one each time, at several times the cost.
        rows, starts = rows.astype(np.int64), starts.astype(np.int64)
        seq_lens = np.add(starts, counts, out=self._seq_lens[:count])
        query_start_loc = self._query_start_loc[: count + 1]
        # A token each, as in most steps: a small model's takes hardly longer than what is in the other branch.
        if np.count_nonzero(counts == 1) == count:
            query_start_loc[:] = self._places[: count + 1]
            request, token_rows, positions, uniform = self._places[:count], rows, starts, True
        else:
            np.cumsum(counts, out=query_start_loc[1:])
            request, uniform = np.repeat(self._places[:count], counts), np.count_nonzero(counts == counts[0]) == count
            token_rows = rows[request]
            positions = starts[request] + np.arange(total) - query_start_loc[request]
        self._query_start_loc[count + 1 :] = total
        longest = int(seq_lens.max(initial=0))

        def group_inputs(number: int) -> GroupInputs:
            group, size = self._groups[number], self._groups[number].block_size
            table = self._tables[number][:, : -(-longest // size)]
            table[:count] = block_tables[number][rows, : table.shape[1]]
            columns, offsets = np.divmod(positions, size)
            slots = self._slots[number][:total]
            np.multiply(table[request, columns], np.int64(size), out=slots)
            slots += offsets
            # Of all rows, most of which may have no tokens: so a tape says nothing of how many have some.
            batch = PagedBatch(size, self._query_start_loc, self._seq_lens, table, group.window)
            return GroupInputs(torch.from_numpy(slots), batch)

        block_tables, groups = table.block_tables, LazyGroups(group_inputs)
        return Placed(rows, query_start_loc, seq_lens, token_rows, positions, groups, uniform)

    def inputs(
        self, placed: Placed, token_ids: Int32 | torch.Tensor, logits_indices: Int32, sampled_rows: Int32 = NONE
    ) -> StepInputs:
        """The step of tokens that have been placed, which may be where the step runs; see `StepInputs`."""
        total, logits = len(placed.positions), len(logits_indices)
        self._input_ids[:total], self._positions[:total] = token_ids, placed.positions
        self._logits_indices[:logits] = logits_indices
        return StepInputs(
            input_ids=torch.from_numpy(self._input_ids[:total]),
            positions=torch.from_numpy(self._positions[:total]),
            groups=placed.groups,
            logits_indices=torch.from_numpy(self._logits_indices[:logits]),
            is_tapeable=total <= MAX_TAPED_TOKENS and (placed.is_uniform or logits == total),
            sampled_rows=sampled_rows,
            placed=placed,
        )

    def of_plan(self, plan: StepPlan, table: RowTable, starts: Int32, drafts: PlannedDrafts | None) -> StepInputs:
        """A plan's step.

        Args:
            plan: With its drafts in the table.
            table: To which it has been applied.
            starts: [r]: as `RowTable.apply` returns them.
            drafts: The plan's; None: there are none.
        """
        placed = self.place(table, plan.rows, starts, plan.num_new_tokens)
        sampled = plan.samples.nonzero()[0] if drafts is None else drafts.of
        ends = placed.query_start_loc[1:][sampled]
        if drafts is not None:
            ends -= drafts.back
        tokens = table.token_ids[placed.token_rows, placed.positions]
        return self.inputs(placed, tokens, ends - 1, sampled.astype(np.int32))
