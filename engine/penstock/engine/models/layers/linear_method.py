"""How a linear layer holds its weight and multiplies by it: what quantisation replaces."""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from penstock.engine.config import ConfigError
from penstock.engine.models.layers.projection import Axis, LinearLayer, Projection, TensorSpec
from penstock.kernels.experts.table import PackedLayer
from penstock.kernels.linear.reference import linear_rows, pack_weight

CPU = torch.device("cpu")


class LinearMethod(Protocol):
    """Made for one layer. Then `tensors` and `load` for each projection, `finish`, and `apply` at each step."""

    @property
    def device(self) -> torch.device:
        """Where the weight lies."""
        ...

    def tensors(self, projection: Projection) -> Mapping[str, TensorSpec]:
        """What a checkpoint must hold for a projection, by name: `weight`, and `bias` or scales beside it."""
        ...

    def load(self, projection: Projection, name: str, value: torch.Tensor) -> None:
        """Takes one of these, whole, and keeps the rank's part of it."""
        ...

    def tie(self, weight: torch.Tensor) -> None:
        """Takes the rank's part of another layer's weight [out, in] in place of one that is loaded."""
        ...

    def finish(self) -> None:
        """Brings the loaded weight into the form that `apply` wants."""
        ...

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in] → [n, out]; a row's result does not depend on the others."""
        ...


LinearMethodFactory = Callable[[LinearLayer], LinearMethod]
LinearKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, int], torch.Tensor]


@runtime_checkable
class FusableMethod(Protocol):
    """A linear method whose weight and bias the kernels of a layer of experts read by themselves."""

    bias: torch.Tensor | None

    @property
    def kernel_weight(self) -> torch.Tensor:
        """After `finish`, as the form's linear kernel reads it."""
        ...


@runtime_checkable
class PackedMethod(LinearMethod, Protocol):
    """A linear method whose weight is packed, for layers that need it in another form than `apply`."""

    def packed_layer(self) -> PackedLayer:
        """After `finish`: what a kernel that takes all experts reads."""
        ...

    def widened(self) -> torch.Tensor:
        """In place of `finish`: the weight [out, in] in the layer's dtype. The method keeps nothing."""
        ...


@runtime_checkable
class MovableMethod(Protocol):
    """A linear method whose weights may be exchanged for those of another layer."""

    def held(self) -> list[torch.Tensor]:
        """After `finish`: all tensors that the layer consists of. Layers of one form have the same ones in the same order. Their
        storage may be replaced."""
        ...


class UnquantizedLinearMethod:
    """The weight in the model's dtype, multiplied by torch on the CPU."""

    def __init__(self, layer: LinearLayer, device: torch.device = CPU) -> None:
        shape, dtype = (layer.out_features, layer.in_features), layer.dtype
        self.device = device
        self.weight = torch.empty(shape, dtype=dtype, device=device)
        self.bias = torch.empty(shape[0], dtype=dtype, device=device) if layer.bias else None

    def tensors(self, projection: Projection) -> Mapping[str, TensorSpec]:
        """What a checkpoint must hold for a projection, by name: `weight`, and `bias` or scales beside it."""
        weight = TensorSpec(projection.shape, outputs=Axis(0), inputs=Axis(1))
        return {"weight": weight} if self.bias is None else {"weight": weight, "bias": _bias(projection)}

    def load(self, projection: Projection, name: str, value: torch.Tensor) -> None:
        """Takes one of these, whole, and keeps the rank's part of it."""
        target = {"weight": self.weight, "bias": self.bias}[name]
        assert target is not None, f"the layer has no {name}"
        part = self.tensors(projection)[name].cut(value, projection)
        target[projection.offset : projection.offset + part.shape[0]].copy_(projection.ordered(part))

    def tie(self, weight: torch.Tensor) -> None:
        """Copies it: `finish` may change its form."""
        self.weight.copy_(weight)

    def finish(self) -> None:
        """Nothing to do: torch multiplies by the weight as it is."""

    def held(self) -> list[torch.Tensor]:
        """Its tensors; see MovableMethod."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in] → [n, out]; a row's result does not depend on the others."""
        return linear_rows(x, self.weight, self.bias)


class DeviceLinearMethod(UnquantizedLinearMethod):
    """The weight on an accelerator, multiplied by its vendor's library for as many rows as there are. Which kernel that takes,
    and with it a row's last bits, depends on their number."""

    @property
    def kernel_weight(self) -> torch.Tensor:
        """After `finish`, as the form's linear kernel reads it."""
        return self.weight

    def tie(self, weight: torch.Tensor) -> None:
        """Shares its memory."""
        self.weight = weight

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See LinearMethod; a row's last bits may depend on the others."""
        return F.linear(x, self.weight, self.bias)


class PrepackedLinearMethod(UnquantizedLinearMethod):
    """The weight in oneDNN's layout, reordered once: less time at small batches, and the same bits at every batch size, but for
    bfloat16 on CPUs with AMX.

    oneDNN compiles a kernel for each number of rows (over a millisecond, half a megabyte that is kept), so that rows are padded
    to few numbers.
    """

    def finish(self) -> None:
        """Reorders the weight; the plain copy is dropped."""
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
        del self.weight

    def held(self) -> list[torch.Tensor]:
        """Refuses: only oneDNN knows what its layout is made of."""
        raise ConfigError("--enable-eplb: experts whose weights are in oneDNN's layout do not move")

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in] → [n, out]; a row's result does not depend on the others, with AMX but for its last bits."""
        rows = x.shape[0]
        padded = padded_rows(rows)
        if padded == rows:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        x = F.pad(x, (0, 0, 0, padded - rows))
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")[:rows]


class NativeLinearMethod(UnquantizedLinearMethod):
    """The weight in our own kernel's order, brought into it once: the same bits at every batch size, without padding.

    Args:
        layer: See UnquantizedLinearMethod.
        linear: The kernel; see `penstock.kernels.linear.reference`.
    """

    def __init__(self, layer: LinearLayer, linear: LinearKernel) -> None:
        super().__init__(layer)
        self._linear = linear

    def finish(self) -> None:
        """Reorders the weight; the plain copy is dropped."""
        self.packed, self._out_features = pack_weight(self.weight), self.weight.shape[0]
        del self.weight

    @property
    def kernel_weight(self) -> torch.Tensor:
        """After `finish`, as the form's linear kernel reads it."""
        return self.packed

    def held(self) -> list[torch.Tensor]:
        """Its tensors; see MovableMethod."""
        return [self.packed] if self.bias is None else [self.packed, self.bias]

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in] → [n, out]; a row's result does not depend on the others."""
        return self._linear(x, self.packed, self.bias, self._out_features)


def padded_rows(rows: int) -> int:
    """The next number of rows for which there may be a kernel: 2 to 16, then multiples of 8, 16 and 64. That for a single row
    adds long sums up in another order."""
    if rows <= 16:
        return max(rows, 2)
    step = 8 if rows <= 64 else 16 if rows <= 256 else 64
    return -(-rows // step) * step


def _bias(projection: Projection) -> TensorSpec:
    return TensorSpec(projection.shape[:1], outputs=Axis(0))
