"""Drafts from a smaller model of the same vocabulary, which keeps keys and values of its own in the same pages.

The draft model reads the tokens that the target model has read, and writes its keys and values into layers of the same KV cache,
behind those of the target. So a prefix that is found in the cache is there for both.

One that sees has a tower and embeddings of its own. They go when the target's do, which may be in the step after the one that
read the image's tokens. So the draft model reads these in the same step.
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
from penstock.engine.runner.image_positions import ImagePositions
from penstock.engine.runner.images import Images
from penstock.engine.runner.input_batch import Placed, StepArrays
from penstock.engine.runner.step_tapes import StepTapes
from penstock.engine.spec.proposer import Proposer
from penstock.kernels.ops import Ops


class Sight(NamedTuple):
    """What a draft model knows of the images in prompts."""

    images: Images | None = None
    """Its own embeddings; None: it reads placeholders."""
    positions: ImagePositions | None = None
    """None: a token's place is its position."""


class _Bound(NamedTuple):
    """What sleeps with the model."""

    model: Model
    kv_caches: list[torch.Tensor]
    tapes: StepTapes | None
    sight: Sight


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

    def bind(self, model: Model, kv_caches: list[torch.Tensor], sight: Sight | None = None) -> None:
        """Takes the draft model, loaded, the caches of its layers (see `ForwardContext`), and what it knows of images; no row
        has a request."""
        tapes = StepTapes(model, self._ops) if self._ops.tape is not None else None
        self._bound = _Bound(model, kv_caches, tapes, sight or Sight())

    def release(self) -> None:
        """Lets go of both, whose memory is wanted back."""
        self._bound = None

    def begins(self, row: int, num_computed: int) -> None:
        """Takes in that a request has come to a row, and how many of its tokens the KV cache holds already."""
        self._computed[row] = num_computed
        self._written[row] = 0

    def skipped(self, table: RowTable, rows: Int32) -> None:
        """See Proposer: never to be caught up with."""
        self._computed[rows], self._written[rows] = table.num_computed[rows], 0

    def follow(self, table: RowTable, rows: Int32, step: Placed, asked: Bool) -> None:
        """Catches up with rows that have filled a block, which others may find in the cache from now on, and with rows that have
        read an image."""
        ends, starts, size = table.num_computed[rows], self._computed[rows], self._block_size
        behind = ~asked & ((ends // size > starts // size) | self._saw(rows, starts, ends - starts))
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
            logits = self._logits(table, rows, ends + np.int32(place - 1), np.ones(len(rows), np.int32), found[-1])
            found.append(self._sampler.choose(logits, rows, ends + np.int32(place), place))
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
            # Rows that are alike run from a tape. To read a token again changes nothing, but an image's may be gone.
            alike = np.minimum(np.int32(most), ends)
            if not self._saw(rows, ends - alike, alike - counts).any():
                counts, starts = alike, ends - alike
        self._computed[rows] = ends
        logits = self._logits(table, rows, starts, counts, wanted=wanted)
        return self._sampler.choose(logits, rows, ends, 0) if wanted else torch.empty(0)

    def _read_part(self, table: RowTable, rows: Int32, starts: Int32, ends: Int32) -> Int32:
        """Reads the first tokens of rows that are too far behind for one pass; returns how far each is then. They are that far
        only after passes that failed, when images may be gone: placeholders are read."""
        while int((ends - starts).sum()) > self._arrays.max_num_tokens:
            part = np.minimum(ends - starts - 1, np.int32(self._arrays.max_num_tokens // len(rows)))
            some = part > 0
            self._logits(table, rows[some], starts[some], part[some], wanted=False, sees=False)
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

    def _saw(self, rows: Int32, starts: Int32, counts: Int32) -> Bool:
        """[r]: which rows have an image that is read among these tokens; arguments as of `_logits`."""
        assert self._bound is not None, "the draft model sleeps"
        images = self._bound.sight.images
        return np.zeros(len(rows), np.bool_) if images is None else images.reached(rows, starts, counts)

    def _logits(
        self,
        table: RowTable,
        rows: Int32,
        starts: Int32,
        counts: Int32,
        tokens: torch.Tensor | None = None,
        *,
        wanted: bool = True,
        sees: bool = True,
    ) -> torch.Tensor:
        """Reads tokens.

        Args:
            table: Has the rows' tokens and blocks.
            rows: [r].
            starts: [r]: the place of each row's first token.
            counts: [r]: tokens of each row.
            tokens: [n]: in place of the table's.
            wanted: Whether logits are.
            sees: Whether images are read; else their placeholders are.

        Returns:
            [r, vocab]: after each row's last token; or [0, …] where none are wanted.
        """
        assert self._bound is not None, "the draft model sleeps"
        model, kv_caches, tapes, sight = self._bound
        placed = self._arrays.place(table, rows, starts, counts)
        last = placed.query_start_loc[1:] - 1 if wanted else NONE
        ids = table.token_ids[placed.token_rows, placed.positions] if tokens is None else tokens
        step = self._arrays.inputs(placed, ids, last)
        given, positions, ends = step.input_ids, step.positions, None
        if sight.positions is not None:
            three = sight.positions.apply(rows, starts, counts, positions.numpy())
            positions = positions if three is None else torch.from_numpy(three)
        if sees and sight.images is not None:
            merged, _ = sight.images.merge(rows, starts, counts, lambda: model.embed(step.input_ids))
            given = given if merged is None else merged
            ends = sight.images.ends(rows, starts, counts)
        ctx = ForwardContext(self._ops, kv_caches, step.groups.of_layers(self._layer_groups, ends))
        plain = given is step.input_ids and positions is step.positions and ends is None
        logits = tapes.run(step, ctx) if tapes is not None and plain else None
        if logits is not None:
            return logits
        hidden = model.forward(given, positions, ctx)
        return model.compute_logits(hidden[step.logits_indices]) if len(step.logits_indices) else hidden[:0]
