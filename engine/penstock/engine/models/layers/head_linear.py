"""A linear layer of each head's own."""

import torch

from penstock.engine.models.build import Build
from penstock.kernels.head_linear.reference import HeadWeight


class HeadLinear:
    """[n, heads, in] → [n, heads, out]; heads are the rank's. Always in the model's dtype."""

    def __init__(self, heads: int, in_features: int, out_features: int, build: Build) -> None:
        self.weight = torch.empty(heads, out_features, in_features, dtype=build.dtype, device=build.device)
        self._ops = build.ops
        self._packed: HeadWeight | None = None

    def finish(self) -> None:
        """After loading: brings the weight into the kernel's order. The plain copy is dropped, if it is another one."""
        self._packed = self._ops.pack_heads(self.weight)
        if self._packed.tensor is not self.weight:
            del self.weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, heads, in] → [n, heads, out]."""
        assert self._packed is not None, "the layer is not loaded"
        return self._ops.head_linear(x, self._packed)
