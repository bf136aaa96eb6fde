"""Steps that run from a tape: on a CPU, a small model's step is mostly the interpreter's.

A tape belongs to a shape: how many tokens there are, and how many rows of logits are wanted. Whose they are is an input. A step
of the shape records it. Inputs stay where they are (`StepArrays`): each later step has written its own there.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from penstock.engine.attention.context import AttentionContext, ForwardContext
from penstock.engine.runner.input_batch import StepInputs
from penstock.kernels.cpu.tape import NotTapeable, Pool, Tape
from penstock.kernels.ops import Ops

log = logging.getLogger(__name__)

_COMES_AGAIN = 3
"""Steps of a shape that run without a tape: to record one takes about as much longer than a step as it saves in so many."""


class TapeShape(NamedTuple):
    """What is part of a tape, and not of its inputs."""

    tokens: int
    logits: int
    """Rows of logits."""


class Taped(Protocol):
    """What a step asks of a model."""

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor, ctx: AttentionContext, /) -> torch.Tensor:
        """Hidden states after the final norm, or what an earlier pipeline stage passes on."""
        ...

    @property
    def compute_logits(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """[n, hidden] → [n, vocab]: in the model's dtype, which samplers widen, or in float32 where they are scaled."""
        ...


class StepTapes:
    """Of one model and one KV cache; to be thrown away with either.

    Args:
        model: `forward` and `compute_logits`.
        ops: Whose `tape` records.
        has_logits: Whether a step ends with them; otherwise with what `forward` returns.
    """

    def __init__(self, model: Taped, ops: Ops, *, has_logits: bool = True) -> None:
        assert ops.tape is not None
        self._model, self._record, self._has_logits = model, ops.tape, has_logits
        self._pool = Pool()
        self._tapes: dict[TapeShape, Tape] = {}
        self._seen: Counter[TapeShape] = Counter()
        """Steps that have run without."""
        self._refused = False

    def run(self, inputs: StepInputs, ctx: ForwardContext) -> torch.Tensor | None:
        """[m, vocab] where there are logits; the next step overwrites them. None: the step must run without a tape."""
        tokens, logits = inputs.input_ids.shape[0], inputs.logits_indices.shape[0]
        if self._refused or not inputs.is_tapeable or not tokens:
            return None
        shape = TapeShape(tokens, logits if self._has_logits else 0)
        tape = self._tapes.get(shape)
        if tape is not None:
            return tape.run()
        if logits < tokens and self._seen[shape] < _COMES_AGAIN:
            # Prompts have any length: only a shape that comes again is worth a tape.
            self._seen[shape] += 1
            return None

        def step() -> torch.Tensor:
            hidden = self._model.forward(inputs.input_ids, inputs.positions, ctx)
            if not self._has_logits:
                return hidden
            if not shape.logits:
                return hidden[:0]
            wanted = hidden if shape.logits == tokens else hidden.index_select(0, inputs.logits_indices)
            return self._model.compute_logits(wanted)

        try:
            self._tapes[shape] = tape = self._record(step, self._pool)
        except NotTapeable as error:
            log.warning("steps run without tapes, and more slowly: %s", error)
            self._refused = True
            return None
        return tape.result
