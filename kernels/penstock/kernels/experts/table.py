"""The weights of a layer's experts, as fused kernels find them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

Gate = Literal["silu", "gelu_tanh", "clamped_swiglu"]


@dataclass
class ExpertTable:
    """Where each expert's weights lie. They are tensors of their own: no second copy, and each is loaded when its turn comes."""

    gate_up: Sequence[torch.Tensor]
    """By expert, as the form's linear kernel wants a weight [2 · inner, hidden]."""
    down: Sequence[torch.Tensor]
    """By expert, [hidden, inner]."""
    hidden: int
    inner: int
    gate: Gate
    clamp: tuple[float, float] = (0.0, 0.0)
    """Slope and limit of a clamped gate."""
    biases: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | None = None
    """By expert, those of both layers; None: there are none."""
    gate_up_at: torch.Tensor = field(init=False)
    """[experts], int64: the addresses."""
    down_at: torch.Tensor = field(init=False)
    biases_at: tuple[torch.Tensor, torch.Tensor] | None = field(init=False)

    def __post_init__(self) -> None:
        self.gate_up_at, self.down_at = _addresses(self.gate_up), _addresses(self.down)
        self.biases_at = None if self.biases is None else (_addresses(self.biases[0]), _addresses(self.biases[1]))


def _addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64).to(tensors[0].device)
