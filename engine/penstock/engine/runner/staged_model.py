"""A pipeline stage in the form of a whole model, so that its steps can run from tapes."""

from collections.abc import Callable, Sequence
from typing import cast

import torch

from penstock.engine.attention.context import AttentionContext
from penstock.engine.models.model import Carry, Model
from penstock.engine.runner.draft_head import TappedModel


class StagedModel:
    """The layers of one stage, which begin with what the stage before has passed on.

    Args:
        model: The stage; the last one may leave states for a draft head.
        carry: What the step under way begins with, in memory that stays where it is; None: it begins with tokens.
        layers: The stage's.
        aux_layers: Whose input the draft head of the last stage takes; see `HeadConfig`.
        last: Whether it ends with logits.
    """

    def __init__(
        self,
        model: Model | TappedModel,
        carry: Callable[[], Carry | None],
        layers: range,
        aux_layers: Sequence[int],
        *,
        last: bool,
    ) -> None:
        self._model, self._carry, self._last = model, carry, last
        self._aux_layers = sorted(layer for layer in aux_layers if layer in layers)
        self._aux = sum(layer < layers.stop for layer in aux_layers)

    @property
    def compute_logits(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """See `Model`: of the last stage alone."""
        return self._model.compute_logits

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: AttentionContext) -> torch.Tensor:
        """[n, hidden] after the final norm, of the last stage; of others [parts, n, hidden], which `passed` takes."""
        if self._last:
            return self._model.forward(input_ids, positions, ctx, self._carry())
        return torch.stack(self.advance(input_ids, positions, ctx).parts())

    def advance(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: AttentionContext) -> Carry:
        """What an earlier stage passes on."""
        carry, aux = self._carry(), dict.fromkeys(self._aux_layers, input_ids)  # whose values the model replaces
        found = cast("Model", self._model).advance(input_ids, positions, ctx, carry, aux)
        return found._replace(aux=(*(() if carry is None else carry.aux), *aux.values()))

    def passed(self, parts: torch.Tensor) -> Carry:
        """The same from the result of `forward`."""
        return Carry.of(parts, self._aux)
