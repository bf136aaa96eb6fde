"""The weights of a layer's experts, as fused kernels find them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

Gate = Literal["silu", "gelu_tanh"]


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
    gate_up_at: torch.Tensor = field(init=False)
    """[experts], int64: the addresses."""
    down_at: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        device = self.gate_up[0].device
        self.gate_up_at, self.down_at = (
            torch.tensor([weight.data_ptr() for weight in weights], dtype=torch.int64).to(device)
            for weights in (self.gate_up, self.down)
        )
