"""The state of all rows as arrays: one class for the scheduler and for every runner, kept equal by applying the same plans.

A row is a stable integer from a request's admission to its release. Host work per step follows what changed; nothing is rebuilt.
"""

from collections.abc import Sequence

import numpy as np

from penstock.engine.core.plan import Int32, StepPlan


class RowTable:
    """Tokens, progress and block tables of `max_num_seqs` rows.

    Between plans `num_computed[row]` is where the row's next step starts. A token that a submitted step samples counts in
    `num_tokens` at once, before anybody knows it; whoever learns it writes it with `write_sampled`. So a plan for the next
    step can be made while this one still runs.

    Args:
        max_num_seqs: Rows.
        max_model_len: Tokens of a row at most.
        block_sizes: Tokens in a block, for each KV group.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_sizes: Sequence[int]) -> None:
        self.block_sizes = tuple(block_sizes)
        self.token_ids: Int32 = np.zeros((max_num_seqs, max_model_len), np.int32)
        """[rows, max_model_len]: valid up to `num_tokens`, except for tokens that are still being sampled."""
        self.num_prompt_tokens: Int32 = np.zeros(max_num_seqs, np.int32)
        """[rows]."""
        self.num_tokens: Int32 = np.zeros(max_num_seqs, np.int32)
        """[rows]: tokens known, those that applied plans sample included."""
        self.num_computed: Int32 = np.zeros(max_num_seqs, np.int32)
        """[rows]: tokens whose KV exists once all applied plans have run."""
        self.block_tables: list[Int32] = [np.zeros((max_num_seqs, -(-max_model_len // size)), np.int32) for size in block_sizes]
        """Per group, [rows, blocks of a full row]; block 0, the null block, beyond `num_blocks`."""
        self.num_blocks: list[Int32] = [np.zeros(max_num_seqs, np.int32) for _ in block_sizes]
        """Per group, [rows]: blocks in the table."""

    def apply(self, plan: StepPlan) -> Int32:
        """Brings the table to the state after `plan`: releases, admissions, block appends, then the rows' progress.

        Returns:
            [r]: for each of the plan's rows the position of its first new token; position + `num_new_tokens` is where its
            sampled token belongs.
        """
        self._release(plan.released)
        for admission in plan.admissions:
            row, count = admission.row, len(admission.token_ids)
            self.token_ids[row, :count] = admission.token_ids
            self.num_prompt_tokens[row] = admission.num_prompt_tokens
            self.num_tokens[row] = count
            self.num_computed[row] = admission.num_computed_tokens
        for group, (rows, blocks) in enumerate(zip(plan.append_rows, plan.append_blocks, strict=True)):
            self._append(group, rows, blocks)
        starts = self.num_computed[plan.rows]
        self.num_computed[plan.rows] = starts + plan.num_new_tokens
        self.num_tokens[plan.rows] += plan.samples
        return starts

    def write_sampled(self, rows: Int32, positions: Int32, token_ids: Int32) -> None:
        """Fills in sampled tokens, [m] each; the rows must still belong to the requests that sampled them."""
        self.token_ids[rows, positions] = token_ids

    def _release(self, rows: Int32) -> None:
        if not len(rows):
            return
        self.num_prompt_tokens[rows] = 0
        self.num_tokens[rows] = 0
        self.num_computed[rows] = 0
        for table, num_blocks in zip(self.block_tables, self.num_blocks, strict=True):
            # A row's next tenant, or padding, must never see blocks that may be somebody else's by now.
            table[rows] = 0
            num_blocks[rows] = 0

    def append_places(self, group: int, rows: Int32) -> Int32:
        """Where in their rows' tables the blocks are that the plan applied last has appended: [a], `rows` being its own."""
        return self.num_blocks[group][rows] - 1 - _ranks(rows[::-1])[::-1]

    def _append(self, group: int, rows: Int32, blocks: Int32) -> None:
        if not len(rows):
            return
        # Several blocks of one row take consecutive places.
        self.block_tables[group][rows, self.num_blocks[group][rows] + _ranks(rows)] = blocks
        np.add.at(self.num_blocks[group], rows, 1)


def _ranks(rows: Int32) -> Int32:
    """How often each row comes before, [a]."""
    order = np.argsort(rows, kind="stable")
    by_row, which = rows[order], np.arange(len(rows), dtype=np.int32)
    begins = np.ones(len(rows), np.bool_)
    np.not_equal(by_row[1:], by_row[:-1], out=begins[1:])
    ranks = np.empty_like(which)
    ranks[order] = which - np.maximum.accumulate(np.where(begins, which, 0))
    return ranks
