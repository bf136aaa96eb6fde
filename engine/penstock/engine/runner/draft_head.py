"""Drafts from a head: a layer or a few that guess on from the target model's hidden states (EAGLE, MTP).

After each step of the target the head reads the step's tokens with the target's states, so that its keys and values rest on true
states alone. The states that it makes up while it drafts are forgotten.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from penstock.engine.attention.context import AttentionContext, ForwardContext
from penstock.engine.core.plan import Bool, Int32
from penstock.engine.core.row_table import RowTable
from penstock.engine.models.draft_head import DraftHead
from penstock.engine.models.model import Carry, Model
from penstock.engine.runner.draft_sampler import DraftSampler
from penstock.engine.runner.input_batch import Placed, StepArrays, StepInputs
from penstock.engine.runner.step_tapes import StepTapes
from penstock.engine.spec.proposer import Proposer
from penstock.kernels.ops import Ops

Following = Callable[[Int32, Int32, Int32, Callable[[], torch.Tensor]], torch.Tensor | None]
"""`Images.following`: the embedding after each token, or None where no image has one."""


class TappedModel:
    """A target model that leaves the states which a head takes in memory that stays where it is.

    Args:
        model: The target, or its last pipeline stage.
        aux_layers: See `HeadConfig`.
        states: [tokens of a step at most, states].
        layers: Of the stage; None: the target has them all.
    """

    def __init__(self, model: Model, aux_layers: Sequence[int], states: torch.Tensor, layers: range | None = None) -> None:
        self._model, self._aux_layers, self._states = model, aux_layers, states
        self._here = [layer for layer in aux_layers if layers is None or layer in layers]
        self._before = sorted(set(aux_layers) - set(self._here))
        self.compute_logits = model.compute_logits

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: AttentionContext, carry: Carry | None = None
    ) -> torch.Tensor:
        """Hidden states after the final norm, of the last stage."""
        aux = dict.fromkeys(self._here, input_ids)  # whose values the model replaces
        hidden = self._model.forward(input_ids, positions, ctx, carry, aux)
        found = aux if carry is None else aux | dict(zip(self._before, carry.aux, strict=True))
        states = torch.cat([found[layer] for layer in self._aux_layers], dim=-1) if found else hidden
        self._states[: len(states)].copy_(states)
        return hidden


class _Pass:
    """A pass of a head in the form of a model: its states come from, and go to, memory that stays where it is."""

    def __init__(self, head: DraftHead, source: torch.Tensor, out: torch.Tensor, *, combines: bool) -> None:
        self._head, self._source, self._out, self._combines = head, source, out, combines
        self.compute_logits = head.compute_logits

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: AttentionContext) -> torch.Tensor:
        """One pass."""
        count = len(input_ids)
        states = self._source[:count]
        hidden, recycled = self._head.forward(input_ids, self._head.combine(states) if self._combines else states, positions, ctx)
        self._out[:count].copy_(recycled)
        return hidden


class _Runs(NamedTuple):
    """A pass and its tapes."""

    model: _Pass
    tapes: StepTapes | None


class _Bound(NamedTuple):
    """What sleeps with the model."""

    kv_caches: list[torch.Tensor]
    first: _Runs
    """Reads a step's tokens."""
    later: _Runs
    """Reads a draft of each row."""
    vocabulary: torch.Tensor | None
    """The draft vocabulary, as in `DraftHead`."""
    head: DraftHead
    images: Following | None
    """None: no prompt has images, or the head's embeddings have another size than theirs."""


class HeadProposer(Proposer):
    """Proposes the tokens that are likeliest by the head, or draws them.

    Args:
        ops: The head's operations.
        layer_groups: Of its layers: numbers of KV groups.
        arrays: Bring its passes to where it runs, of as many tokens as `states` has.
        states: [tokens of a step at most, states]: the target's, as `TappedModel` leaves them.
        hidden_size: The head's.
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
        states: torch.Tensor,
        *,
        hidden_size: int,
        max_num_seqs: int,
        max_model_len: int,
        num_drafts: int,
        sampler: DraftSampler,
    ) -> None:
        self._ops, self._layer_groups, self._states, self._sampler = ops, layer_groups, states, sampler
        self._max_model_len, self._num_drafts = max_model_len, num_drafts
        self._arrays = arrays
        self._read = states.new_zeros(len(states), hidden_size)
        """[tokens of a step, hidden]: what the first pass has made of them."""
        self._guessed = states.new_zeros(max_num_seqs, hidden_size)
        """[rows of a pass, hidden]: what the last pass has made of drafts."""
        self._place: Int32 = np.zeros(max_num_seqs, np.int32)
        """[rows]: where the row's last token stands in the step."""
        self._last = torch.empty(0, dtype=torch.int64)
        """[m]: where the last tokens stand in the step, of the rows for which drafts will be asked."""
        self._first = torch.empty(0)
        """[m]: the first drafts of the rows for which drafts will be asked."""
        self._bound: _Bound | None = None

    def bind(self, head: DraftHead, kv_caches: list[torch.Tensor], images: Following | None = None) -> None:
        """Takes the head, loaded, the caches of its layers (see `ForwardContext`), and what knows the images of prompts; no row
        has a request."""
        runs: list[_Runs] = []
        for source, out, combines in ((self._states, self._read, True), (self._guessed, self._guessed, False)):
            model = _Pass(head, source, out, combines=combines)
            runs.append(_Runs(model, StepTapes(model, self._ops) if self._ops.tape is not None else None))
        self._bound = _Bound(kv_caches, runs[0], runs[1], head.vocabulary, head, images)

    def release(self) -> None:
        """Lets go of both, whose memory is wanted back."""
        self._bound = None

    def follow(self, table: RowTable, rows: Int32, step: Placed, asked: Bool) -> None:
        """Reads the tokens of a step. Those of rejected drafts too, so that steps that are alike run from a tape: the next step
        writes over what comes of them."""
        assert self._bound is not None, "the head sleeps"
        starts, ends = step.query_start_loc[:-1], step.query_start_loc[1:]
        owners = np.repeat(rows, ends - starts)
        following = table.token_ids[owners, np.minimum(step.positions + 1, self._max_model_len - 1)]
        self._place[rows] = starts + table.num_computed[rows] - 1 - (step.seq_lens - (ends - starts))
        of = rows[asked]
        inputs = self._arrays.inputs(step, following, self._place[of])
        logits = self._logits(self._bound.first, inputs, self._with_images(self._bound, inputs.input_ids, rows, step))
        if len(of):
            self._last = inputs.logits_indices.clone()
            self._first = self._choose(logits, of, table.num_tokens[of], 0)

    def propose(self, table: RowTable, rows: Int32, known: Int32, most: int) -> Int32:
        """See Proposer. Drafts end where a row's blocks end."""
        assert self._bound is not None, "the head sleeps"
        drafts = np.full((len(rows), self._num_drafts), -1, np.int32)
        ends, found = known - 1, [self._first]
        has_room = np.minimum(table.room[rows], self._max_model_len) - ends
        torch.index_select(self._read, 0, self._last, out=self._guessed[: len(rows)])
        for place in range(1, most):
            at = np.minimum(ends + np.int32(place - 1), self._max_model_len - 1)
            placed = self._arrays.place(table, rows, at, np.ones(len(rows), np.int32))
            step = self._arrays.inputs(placed, found[-1], np.arange(len(rows), dtype=np.int32))
            found.append(self._choose(self._logits(self._bound.later, step), rows, ends + np.int32(1 + place), place))
        drafts[:, :most] = torch.stack(found, dim=1).cpu().numpy()
        drafts[:, 1:][np.arange(1, self._num_drafts) > has_room[:, None]] = -1
        return drafts

    def _with_images(self, bound: _Bound, input_ids: torch.Tensor, rows: Int32, step: Placed) -> torch.Tensor:
        """[n] tokens, or [n, hidden] embeddings where images are among them."""
        if bound.images is None:
            return input_ids
        begins = step.query_start_loc[:-1]
        starts, counts = step.positions[begins].astype(np.int32), np.diff(step.query_start_loc)
        found = bound.images(rows, starts, counts, lambda: bound.head.embed(input_ids))
        return input_ids if found is None else found

    def _choose(self, logits: torch.Tensor, rows: Int32, positions: Int32, place: int) -> torch.Tensor:
        assert self._bound is not None
        return self._sampler.choose(logits, rows, positions, place, self._bound.vocabulary)

    def _logits(self, run: _Runs, step: StepInputs, given: torch.Tensor | None = None) -> torch.Tensor:
        """[m, draft vocabulary]: of the step's rows of logits, of which there may be none. `given`: in place of its tokens."""
        assert self._bound is not None
        ctx = ForwardContext(self._ops, self._bound.kv_caches, step.groups.of_layers(self._layer_groups))
        given = step.input_ids if given is None else given
        logits = run.tapes.run(step, ctx) if run.tapes is not None and given is step.input_ids else None
        if logits is not None:
            return logits
        hidden = run.model.forward(given, step.positions, ctx)
        return run.model.compute_logits(hidden[step.logits_indices]) if len(step.logits_indices) else hidden[:0]
