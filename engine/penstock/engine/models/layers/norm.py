"""Norms with their weights."""

from typing import Protocol

import torch
import torch.nn.functional as F

from penstock.engine.models.layers.linear_method import CPU
from penstock.engine.models.layers.weight import Weight, Weights
from penstock.kernels.ops import Ops


class Norm(Protocol):
    """Of the last dimension; weights are float32 whatever the model's dtype."""

    weight: torch.Tensor

    def weights(self) -> Weights:
        """Under `name.weight`, and `name.bias` if it has one."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, size] → [n, size]."""
        ...

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalised sum and the sum, each [n, size]."""
        ...


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


class LayerNorm:
    """Subtracts the mean and divides by the standard deviation (Ba et al., 2016). See Norm.

    Args:
        bias: Whether it has one.
    """

    def __init__(self, name: str, size: int, eps: float, bias: bool, device: torch.device = CPU) -> None:
        self.weight = torch.empty(size, dtype=torch.float32, device=device)
        self.bias = torch.empty(size, dtype=torch.float32, device=device) if bias else None
        self._name, self._eps = name, eps

    def weights(self) -> Weights:
        """Under `name.weight`, and `name.bias` if it has one."""
        shape = tuple(self.weight.shape)
        found: Weights = {f"{self._name}.weight": Weight(shape, self._load_weight)}
        if self.bias is not None:
            found[f"{self._name}.bias"] = Weight(shape, self._load_bias)
        return found

    def _load_weight(self, value: torch.Tensor) -> None:
        self.weight.copy_(value)

    def _load_bias(self, value: torch.Tensor) -> None:
        assert self.bias is not None
        self.bias.copy_(value)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, size] → [n, size]."""
        return F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self._eps).to(x.dtype)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The normalised sum and the sum, each [n, size]."""
        total = x + residual
        return self(total), total
