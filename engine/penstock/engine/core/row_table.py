"""The state of all rows as arrays: one class for the scheduler and for every runner, kept equal by applying the same plans.

A row is a stable integer from a request's admission to its release. Host work per step follows what changed; nothing is rebuilt.
"""

from collections.abc import Sequence

import numpy as np

from penstock.engine.core.plan import NONE, Bool, Int32, Int64, StepPlan


class RowTable:
    """Tokens, progress and block tables of `max_num_seqs` rows.

    A plan counts at once as if each of its drafts would be accepted: `num_computed` and `num_tokens` are what they are at most
    once all applied plans have run. So a plan for the next step can be made while this one still runs. `settle` takes in how far
    a step really came, and `write_sampled` its tokens. A table whose plans have all been settled is exact.

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
        """[rows]: tokens known at most, those that applied plans sample included."""
        self.num_computed: Int32 = np.zeros(max_num_seqs, np.int32)
        """[rows]: tokens at most whose KV exists once all applied plans have run."""
        self.num_settled: Int32 = np.zeros(max_num_seqs, np.int32)
        """[rows]: tokens whose KV settled plans have computed, rejected drafts not counted."""
        self.block_tables: list[Int32] = [np.zeros((max_num_seqs, -(-max_model_len // size)), np.int32) for size in block_sizes]
        """Per group, [rows, blocks of a full row]; block 0, the null block, beyond `num_blocks`."""
        self.num_blocks: list[Int32] = [np.zeros(max_num_seqs, np.int32) for _ in block_sizes]
        """Per group, [rows]: blocks in the table."""
        self.room: Int32 = np.zeros(max_num_seqs, np.int32)
        """[rows]: tokens that the blocks hold, in the group where they hold the fewest."""
        self.append_places: list[Int32] = [NONE for _ in block_sizes]
        """Per group, [a]: where in their rows' tables the last applied plan appended blocks."""

    def apply(self, plan: StepPlan) -> Int32:
        """Brings the table to the state after `plan`: releases, admissions, block appends, then the rows' progress.

        Returns:
            [r]: for each of the plan's rows the position of its first new token, where all plans before it have been settled;
            otherwise the rightmost that it can be.
        """
        self._release(plan.released)
        for admission in plan.admissions:
            row, count = admission.row, len(admission.token_ids)
            self.token_ids[row, :count] = admission.token_ids
            self.num_prompt_tokens[row] = admission.num_prompt_tokens
            self.num_tokens[row] = count
            self.num_computed[row] = self.num_settled[row] = admission.num_computed_tokens
        grown = list[Int64]()
        for group, rows in enumerate(plan.append_rows):
            if len(rows):
                grown.append(_indexes(rows))
                self._append(group, grown[-1], plan.append_blocks[group])
            else:
                self.append_places[group] = NONE
        for rows in grown:
            self.room[rows] = self._held(rows)
        rows = _indexes(plan.rows)
        starts = self.num_computed[rows]
        self.num_computed[rows] = starts + plan.num_new_tokens
        # Not in place: numpy takes twice as long to add booleans to integers there.
        known = plan.samples + plan.num_drafts if len(plan.num_drafts) else plan.samples
        self.num_tokens[rows] = self.num_tokens[rows] + known
        return starts

    def settle(self, plan: StepPlan, counts: Int32, live: Bool | None = None) -> tuple[Int32, Int32]:
        """Takes in how far the oldest plan that is not settled came: its rejected drafts count as if they had never run.

        Args:
            plan: It.
            counts: [r]: tokens that each of its rows gave; with 0 it came as far as planned.
            live: [r]: whether the row still belongs to the request of that plan; None: each does.

        Returns:
            [r] each: the position of the first token that ran, and the one after the last that was accepted, which is where the
            newest sampled token belongs. Of no meaning where the row is not `live`.
        """
        rows = _indexes(plan.rows)
        starts = self.num_settled[rows]
        ends = starts + plan.num_new_tokens
        rejected = None
        if len(plan.num_drafts):
            rejected = _rejected(plan, counts)
            ends -= rejected
        if live is not None and np.count_nonzero(live) < len(live):
            rows, settled = rows[live], ends[live]
            rejected = None if rejected is None else rejected[live]
        else:
            settled = ends
        self.num_settled[rows] = settled
        if rejected is not None:
            self._take_back(rows, rejected)
        return starts, ends

    def reject(self, plan: StepPlan, counts: Int32, live: Bool | None = None) -> None:
        """`settle` for a table that needs no `num_settled`, as no plan has a row whose drafts are not settled; arguments as
        there."""
        rows, rejected = _indexes(plan.rows), _rejected(plan, counts)
        self._take_back(*((rows, rejected) if live is None else (rows[live], rejected[live])))

    def _take_back(self, rows: Int64, rejected: Int32) -> None:
        self.num_tokens[rows] -= rejected
        self.num_computed[rows] -= rejected

    def write_sampled(self, rows: Int32 | Int64, positions: Int32, token_ids: Int32) -> None:
        """Fills in sampled tokens, [m] each; the rows must still belong to the requests that sampled them."""
        self.token_ids[rows, positions] = token_ids

    def write_tokens(self, rows: Int32 | Int64, firsts: Int32, token_ids: Int32, counts: Int32) -> None:
        """The same of several tokens a row: the first `counts`, [m], of `token_ids`, [m, w], from the positions `firsts` on."""
        if token_ids.shape[1] == 1:
            self.write_sampled(rows, firsts, token_ids[:, 0])
            return
        of, places = first_places(token_ids.shape[1], counts).nonzero()
        self.write_sampled(rows[of], firsts[of] + places, token_ids[of, places])

    def write_result(self, plan: StepPlan, starts: Int32, token_ids: Int32, counts: Int32) -> Int32:
        """Fills in what a step gave, behind the tokens that it found known.

        Args:
            plan: The step's.
            starts: [r]: as `apply` returned them, exact.
            token_ids: [r, w].
            counts: [r]: how many of a row's tokens count; 0 where the row has come to somebody else since.

        Returns:
            [r]: tokens of each row that are known then.
        """
        known = starts + plan.num_new_tokens
        firsts = known - plan.num_drafts if len(plan.num_drafts) else known
        # A row whose context is full may sample once more; that token has no place.
        counts = np.minimum(counts, self.token_ids.shape[1] - firsts)
        given = counts > 0
        if given.any():
            self.write_tokens(plan.rows[given], firsts[given], token_ids[given], counts[given])
        return firsts + counts

    def _release(self, rows: Int32) -> None:
        if not len(rows):
            return
        self.num_prompt_tokens[rows] = 0
        self.num_tokens[rows] = 0
        self.num_computed[rows] = 0
        self.num_settled[rows] = 0
        self.room[rows] = 0
        for table, num_blocks in zip(self.block_tables, self.num_blocks, strict=True):
            # A row's next tenant, or padding, must never see blocks that may be somebody else's by now.
            table[rows] = 0
            num_blocks[rows] = 0

    def _held(self, rows: Int64) -> Int32:
        held = self.num_blocks[0][rows] * self.block_sizes[0]
        for num_blocks, size in zip(self.num_blocks[1:], self.block_sizes[1:], strict=True):
            np.minimum(held, num_blocks[rows] * size, out=held)
        return held

    def _append(self, group: int, rows: Int64, blocks: Int32) -> None:
        num_blocks = self.num_blocks[group]
        self.append_places[group] = places = num_blocks[rows]
        if len(set(rows.tolist())) == len(rows):  # as in nearly all steps
            num_blocks[rows] = places + 1
        else:
            # Several blocks of one row take consecutive places.
            places += ranks(rows)
            np.add.at(num_blocks, rows, 1)
        self.block_tables[group][rows, places] = blocks


def _indexes(rows: Int32 | Int64) -> Int64:
    """The same in the type that numpy indexes with: it converts any other one each time, at several times the cost."""
    return rows.astype(np.int64)


def _rejected(plan: StepPlan, counts: Int32) -> Int32:
    """[r]: how many of a plan's drafts are not accepted; a row without a token came as far as planned."""
    return np.where(counts > 0, plan.num_drafts + 1 - counts, np.int32(0))


def first_of(values: Int32, counts: Int32) -> Int32:
    """The first `counts`, [m], of each row of `values`, [m, w], row by row; at least one of each."""
    if values.shape[1] == 1:
        return values[:, 0]
    return values[first_places(values.shape[1], counts)]


def first_places(width: int, counts: Int32) -> Bool:
    """[m, width]: which places are among the first `counts`, [m], of their rows."""
    return np.arange(width, dtype=np.int32) < counts[:, None]


def ranks(rows: Int32 | Int64) -> Int32:
    """How often each row comes before, [a]."""
    order = np.argsort(rows, kind="stable")
    by_row, which = rows[order], np.arange(len(rows), dtype=np.int32)
    begins = np.ones(len(rows), np.bool_)
    np.not_equal(by_row[1:], by_row[:-1], out=begins[1:])
    ranks = np.empty_like(which)
    ranks[order] = which - np.maximum.accumulate(np.where(begins, which, 0))
    return ranks
