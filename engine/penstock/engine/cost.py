"""The shape of a model as far as it decides what a step costs, and that cost: floating-point operations and bytes.

No numpy: the configuration holds a `ModelCost`.
"""

import msgspec


class WindowCost(msgspec.Struct, frozen=True):
    """Layers that see equally far."""

    window: int | None
    """Tokens that one attends to, itself included; None: all before it."""
    flops_per_pair: int
    """FLOPs of one query with one key and its value, over these layers and all heads."""
    kv_bytes_per_token: int
    """Keys and values of one token in these layers."""


class ModelCost(msgspec.Struct, frozen=True, kw_only=True):
    """A model's shape as far as it decides the cost."""

    linear_flops_per_token: int
    """FLOPs of all layers' matrix products, for each token."""
    lm_head_flops_per_row: int
    layer_weight_bytes: int
    lm_head_bytes: int
    windows: tuple[WindowCost, ...]


class StepCost(msgspec.Struct, frozen=True, array_like=True):
    """Cost of one step, or the sum over many. Floats, since a year of steps exceeds 64 bits."""

    linear_flops: float = 0.0
    attention_flops: float = 0.0
    lm_head_flops: float = 0.0
    weight_bytes: float = 0.0
    """Read."""
    kv_read_bytes: float = 0.0
    kv_write_bytes: float = 0.0

    def __add__(self, other: "StepCost") -> "StepCost":
        """Return the sum."""
        return StepCost(
            self.linear_flops + other.linear_flops,
            self.attention_flops + other.attention_flops,
            self.lm_head_flops + other.lm_head_flops,
            self.weight_bytes + other.weight_bytes,
            self.kv_read_bytes + other.kv_read_bytes,
            self.kv_write_bytes + other.kv_write_bytes,
        )

    @property
    def flops(self) -> float:
        """All operations."""
        return self.linear_flops + self.attention_flops + self.lm_head_flops

    @property
    def bytes(self) -> float:
        """All bytes moved."""
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes
