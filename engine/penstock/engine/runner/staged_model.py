"""A pipeline stage in the form of a whole model, so that its steps can run from tapes."""

from collections.abc import Callable

import torch

from penstock.engine.attention.context import AttentionContext
from penstock.engine.models.model import Carry, Model


class StagedModel:
    """The layers of one stage, which begin with what the stage before has passed on.

    Args:
        model: The stage.
        carry: What the step under way begins with, in memory that stays where it is; None: it begins with tokens.
        last: Whether it ends with logits.
    """

    def __init__(self, model: Model, carry: Callable[[], Carry | None], *, last: bool) -> None:
        self._model, self._carry, self._last = model, carry, last

    @property
    def compute_logits(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """See `Model`: of the last stage alone."""
        return self._model.compute_logits

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: AttentionContext) -> torch.Tensor:
        """[n, hidden] after the final norm, of the last stage; of others [1 or 2, n, hidden], the parts of what they pass on."""
        if self._last:
            return self._model.forward(input_ids, positions, ctx, self._carry())
        return torch.stack(self._model.advance(input_ids, positions, ctx, self._carry()).parts())
