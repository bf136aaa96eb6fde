"""Drafts from a smaller model of the same vocabulary, which keeps keys and values of its own in the same pages.

The draft model reads the tokens that the target model has read, and writes its keys and values into layers of the same KV cache,
behind those of the target. So a prefix that is found in the cache is there for both.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from penstock.engine.attention.context import ForwardContext
from penstock.engine.core.plan import NONE, Bool, Int32
from penstock.engine.core.row_table import RowTable
from penstock.engine.models.model import Model
from penstock.engine.runner.draft_sampler import DraftSampler
from penstock.engine.runner.input_batch import Placed, StepArrays, StepInputs
from penstock.engine.runner.step_tapes import StepTapes
from penstock.engine.spec.proposer import Proposer
from penstock.kernels.ops import Ops


class _Bound(NamedTuple):
    """What sleeps with the model."""

    model: Model
    kv_caches: list[torch.Tensor]
    tapes: StepTapes | None


class DraftModel(Proposer):
    """Proposes the tokens that are likeliest by the draft model, or draws them.

    Args:
        ops: The draft model's operations.
        layer_groups: Of its layers: numbers of KV groups.
        arrays: Bring its passes to where it runs, of as many tokens as `most_tokens` says.
        block_size: Tokens of the smallest block of target and draft model.
        max_num_seqs: Rows.
        max_model_len: Tokens of a row at most.
        num_drafts: K.
        sampler: Chooses the drafts.
    """

    def __init__(
        self,
        ops: Ops,
        layer_groups: Sequence[int],
        arrays: StepArrays,
        block_size: int,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_drafts: int,
        sampler: DraftSampler,
    ) -> None:
        self._ops, self._layer_groups, self._sampler = ops, layer_groups, sampler
        self._max_model_len, self._num_drafts = max_model_len, num_drafts
        self._arrays, self._block_size = arrays, block_size
        self._bound: _Bound | None = None
        self._computed: Int32 = np.zeros(max_num_seqs, np.int32)
        """[rows]: tokens whose keys and values the draft model has written; of drafts see below."""
        self._drafts: Int32 = np.full((max_num_seqs, num_drafts), -1, np.int32)
        """[rows, K]: what was proposed last for the tokens from `_computed` on."""
        self._written: Int32 = np.zeros(max_num_seqs, np.int32)
        """[rows]: how many of these have keys and values too."""

    @staticmethod
    def most_tokens(max_num_tokens: int, max_num_seqs: int, block_size: int, num_drafts: int) -> int:
        """Of a pass: a row that has rested is behind by less than a block, or by a step's tokens."""
        return max_num_tokens + max_num_seqs * (block_size + num_drafts)

    def bind(self, model: Model, kv_caches: list[torch.Tensor]) -> None:
        """Takes the draft model, loaded, and the caches of its layers (see `ForwardContext`); no row has a request."""
        self._bound = _Bound(model, kv_caches, StepTapes(model, self._ops) if self._ops.tape is not None else None)

    def release(self) -> None:
        """Lets go of both, whose memory is wanted back."""
        self._bound = None

    def begins(self, row: int, num_computed: int) -> None:
        """Takes in that a request has come to a row, and how many of its tokens the KV cache holds already."""
        self._computed[row] = num_computed
        self._written[row] = 0

    def follow(self, table: RowTable, rows: Int32, step: Placed, asked: Bool) -> None:
        """Catches up with rows that have filled a block, which others may find in the cache from now on."""
        ends, size = table.num_computed[rows], self._block_size
        behind = ~asked & (ends // size > self._computed[rows] // size)
        if behind.any():
            self._catch_up(table, rows[behind], ends[behind], wanted=False)

    def propose(self, table: RowTable, rows: Int32, known: Int32, most: int) -> Int32:
        """See Proposer. Drafts end where a row's blocks end."""
        drafts = np.full((len(rows), self._num_drafts), -1, np.int32)
        ends = known
        places = ends[:, None] - 1 + np.arange(most)  # of the tokens that are read for each draft
        has_room = (places < table.room[rows][:, None]) & (places < self._max_model_len)
        fits = has_room[:, -1]
        if not fits.all():
            # They have no block yet for what would be drafted, as after a prompt that fills its blocks.
            self._catch_up(table, rows[~fits], table.num_computed[rows[~fits]], wanted=False)
        if not fits.any():
            return drafts
        rows, ends = rows[fits], ends[fits]
        found = [self._catch_up(table, rows, ends, wanted=True)]
        for place in range(1, most):
            placed = self._arrays.place(table, rows, ends + np.int32(place - 1), np.ones(len(rows), np.int32))
            step = self._arrays.inputs(placed, found[-1], np.arange(len(rows), dtype=np.int32))
            found.append(self._sampler.choose(self._logits(step), rows, ends + np.int32(place), place))
        proposed = drafts[fits]
        proposed[:, :most] = torch.stack(found, dim=1).cpu().numpy()
        self._drafts[rows], self._written[rows] = proposed, most - 1
        drafts[fits] = proposed
        return drafts

    def _catch_up(self, table: RowTable, rows: Int32, ends: Int32, *, wanted: bool) -> torch.Tensor:
        """Reads the tokens of rows, [m], up to `ends`, [m]; returns the first drafts, [m], where they are wanted."""
        starts = self._keep_accepted(table, rows, ends)
        starts = self._read_part(table, rows, starts, ends)
        counts = ends - starts
        if wanted and (most := int(counts.max())) <= self._num_drafts + 1:
            # Rows that are alike run from a tape. To read a token again changes nothing.
            counts = np.minimum(np.int32(most), ends)
            starts = ends - counts
        placed = self._arrays.place(table, rows, starts, counts)
        last = placed.query_start_loc[1:] - 1 if wanted else NONE
        step = self._arrays.inputs(placed, table.token_ids[placed.token_rows, placed.positions], last)
        self._computed[rows] = ends
        logits = self._logits(step)
        return self._sampler.choose(logits, rows, ends, 0) if wanted else torch.empty(0)

    def _read_part(self, table: RowTable, rows: Int32, starts: Int32, ends: Int32) -> Int32:
        """Reads the first tokens of rows that are too far behind for one pass; returns how far each is then."""
        while int((ends - starts).sum()) > self._arrays.max_num_tokens:
            part = np.minimum(ends - starts - 1, np.int32(self._arrays.max_num_tokens // len(rows)))
            some = part > 0
            placed = self._arrays.place(table, rows[some], starts[some], part[some])
            self._logits(self._arrays.inputs(placed, table.token_ids[placed.token_rows, placed.positions], NONE))
            starts = starts + part
        return starts

    def _keep_accepted(self, table: RowTable, rows: Int32, ends: Int32) -> Int32:
        """Counts drafts that were accepted as read, since they were; returns how far each row is, [m], before its last token."""
        places = np.minimum(self._computed[rows][:, None] + np.arange(self._num_drafts), self._max_model_len - 1)
        same = (self._drafts[rows] == table.token_ids[rows[:, None], places]) & (
            np.arange(self._num_drafts) < self._written[rows][:, None]
        )
        accepted = np.logical_and.accumulate(same, axis=1).sum(axis=1, dtype=np.int32)
        self._written[rows] = 0
        return np.minimum(self._computed[rows] + accepted, ends - 1)

    def _logits(self, step: StepInputs) -> torch.Tensor:
        """[m, vocab]: of the step's rows of logits, of which there may be none."""
        assert self._bound is not None, "the draft model sleeps"
        model, kv_caches, tapes = self._bound
        ctx = ForwardContext(self._ops, kv_caches, [step.groups[number] for number in self._layer_groups])
        logits = tapes.logits(step, ctx) if tapes is not None else None
        if logits is not None:
            return logits
        hidden = model.forward(step.input_ids, step.positions, ctx)
        return model.compute_logits(hidden[step.logits_indices]) if len(step.logits_indices) else hidden[:0]
