"""A decoder layer of few tokens on a device, in six launches: norms, gate and residual stream belong to the linear layers."""

from dataclasses import dataclass
from typing import Self

import torch

from penstock.engine.models.layers.comm import Comm, OneRank
from penstock.engine.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from penstock.engine.models.layers.linear_method import DeviceLinearMethod
from penstock.engine.models.layers.norm import Norm, RMSNorm
from penstock.kernels.few_rows.reference import MAX_ROWS, Activation
from penstock.kernels.ops import FEW_ROWS, Ops


@dataclass(frozen=True)
class FewRows:
    """One half of a layer: a norm, a linear layer and, after what stands between, another one that adds to the stream."""

    ops: Ops
    norm: RMSNorm
    first: DeviceLinearMethod
    second: DeviceLinearMethod

    @classmethod
    def of(cls, ops: Ops, norm: Norm, first: ColumnParallelLinear, second: RowParallelLinear, comm: Comm) -> Self | None:
        """None where the form lacks these operations, ranks add up their results, or weights are not in torch's form, as with
        adapters or few bits."""
        if any(getattr(ops, name) is None for name in FEW_ROWS) or not isinstance(comm, OneRank) or not isinstance(norm, RMSNorm):
            return None
        one, two = first.method, second.method
        if type(one) is not DeviceLinearMethod or type(two) is not DeviceLinearMethod:
            return None
        return cls(ops, norm, one, two)

    @staticmethod
    def serve(x: torch.Tensor) -> bool:
        """Whether there are few enough."""
        return x.shape[0] <= MAX_ROWS

    def enter(self, stream: torch.Tensor) -> torch.Tensor:
        """[n, hidden] of the residual stream → [n, out]: normalised, then multiplied."""
        assert self.ops.norm_linear is not None
        return self.ops.norm_linear(stream, self.norm.weight, self.norm.eps, self.first.weight, self.first.bias)

    def enter_gated(self, stream: torch.Tensor, activation: Activation) -> torch.Tensor:
        """The same, and the gate: [n, hidden] → [n, inner]."""
        weight, bias = self.first.weight, self.first.bias
        assert self.ops.norm_gated_linear is not None
        return self.ops.norm_gated_linear(stream, self.norm.weight, self.norm.eps, weight, bias, activation)

    def leave(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """[n, in] and the stream, [n, hidden], → the stream with what is added to it."""
        assert self.ops.linear_add is not None
        return self.ops.linear_add(x, self.second.weight, self.second.bias, stream)
