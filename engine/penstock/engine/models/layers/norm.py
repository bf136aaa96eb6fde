"""RMSNorm with its weight."""

import torch

from penstock.engine.models.layers.linear_method import CPU
from penstock.engine.models.layers.weight import Weight, Weights
from penstock.kernels.ops import Ops


class RMSNorm:
    """Of the last dimension, of `size` elements; the weight is float32 whatever the model's dtype.

    Args:
        offset: What the model adds to the checkpoint's weight: 1 in Gemma.
    """

    def __init__(self, name: str, size: int, eps: float, ops: Ops, offset: float = 0.0, device: torch.device = CPU) -> None:
        self.weight = torch.empty(size, dtype=torch.float32, device=device)
        self.eps = eps
        self._name, self._ops, self._offset = name, ops, offset

    def weights(self) -> Weights:
        """Under `name.weight`."""
        return {f"{self._name}.weight": Weight(tuple(self.weight.shape), self._load)}

    def _load(self, value: torch.Tensor) -> None:
        self.weight.copy_(value).add_(self._offset)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, size] → [n, size]."""
        return self._ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalised sum and the sum, each [n, size]."""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)
