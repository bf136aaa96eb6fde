"""What a device lets a step cost at best (Williams et al., 2009): its bytes at the memory's speed or its operations at the
processor's, whichever takes longer. Pure.

A third ceiling is capacity: how many sequences' keys and values fit at all.
"""

from typing import Literal

import msgspec

from penstock.engine.cost import ModelCost, StepCost


class Ceilings(msgspec.Struct, frozen=True):
    """What a device reaches when it does one thing alone."""

    bytes_per_s: float
    """Bytes per second of its memory, read and written."""
    flops_per_s: float
    """FLOPs per second of matrix products in the model's type."""

    @property
    def balance_point(self) -> float:
        """Operations a byte from which on a kernel is bound by operations."""
        return self.flops_per_s / self.bytes_per_s


H200 = Ceilings(bytes_per_s=4.8e12, flops_per_s=989e12)
"""NVIDIA's datasheet, bf16 without sparsity; a measured device reaches less."""


def floor_s(cost: StepCost, ceilings: Ceilings) -> float:
    """Seconds under which no step of that cost comes."""
    return max(cost.bytes / ceilings.bytes_per_s, cost.flops / ceilings.flops_per_s)


def binding(cost: StepCost, ceilings: Ceilings) -> Literal["bandwidth", "compute"]:
    """Return which of the two bounds a step."""
    return "bandwidth" if cost.bytes / ceilings.bytes_per_s >= cost.flops / ceilings.flops_per_s else "compute"


def max_sequences(model: ModelCost, context: int, kv_bytes: int) -> int:
    """Return how many sequences of `context` tokens fit into `kv_bytes` with their keys and values."""
    tokens = sum(context_of(context, group.window) * group.kv_bytes_per_token for group in model.windows)
    return kv_bytes // tokens


def context_of(tokens: int, window: int | None) -> int:
    """Tokens of a context that layers with a window keep."""
    return tokens if window is None else min(tokens, window)
