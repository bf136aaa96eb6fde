"""A linear layer whose weight stays packed in memory, however it came to be quantized."""

import torch

from penstock.engine.models.layers.linear_method import CPU
from penstock.engine.models.layers.projection import Axis, LinearLayer, Projection, TensorSpec
from penstock.kernels.experts.table import PackedLayer
from penstock.kernels.ops import Ops
from penstock.kernels.quantized_linear.reference import Number, bits, dequantized, pack_quantized
from penstock.kernels.quantized_linear.rounding import Rounding

NAME_OF_BIAS = "bias"


class PackedWeight:
    """What linear methods over packed weights have in common: room for the numbers while they load, and the product.

    Args:
        layer: Whose weight it is.
        number: What its numbers are.
        group: Inputs that share a scale; None: all.
        scale_dtype: Of the scales; None: as the first ones that are kept.
        zeros: Whether there are zero points.
        rounding: Of the inputs; None: they are multiplied as they are.
        ops: The kernels.
    """

    device = CPU

    def __init__(
        self,
        layer: LinearLayer,
        number: Number,
        group: int | None,
        scale_dtype: torch.dtype | None,
        zeros: bool,
        rounding: Rounding | None,
        ops: Ops,
    ) -> None:
        rows, inputs = layer.out_features, layer.in_features
        self._layer, self._linear = layer, ops.quantized_linear
        self._number: Number = number
        self._group = group or inputs + inputs % 2
        self._pairs = torch.zeros(rows, (inputs + 1) // 2, bits(number) // 4, dtype=torch.int8)
        self._scale_dtype = scale_dtype
        self._scales = torch.ones(rows, -(-inputs // self._group), dtype=scale_dtype)
        self._zeros = torch.zeros(self._scales.shape, dtype=torch.int8) if zeros else None
        self.bias = torch.empty(rows, dtype=layer.dtype) if layer.bias else None
        self._rounding, self._round = rounding, ops.rounded_inputs
        self._input_scale = None if rounding is None or rounding.dynamic else torch.zeros(1)
        self._input_zero: torch.Tensor | None = None

    def bias_of(self, projection: Projection) -> dict[str, TensorSpec]:
        """What a checkpoint must hold of the bias."""
        return {} if self.bias is None else {NAME_OF_BIAS: TensorSpec(projection.shape[:1], outputs=Axis(0))}

    def load_bias(self, projection: Projection, value: torch.Tensor) -> None:
        """Takes a projection's bias."""
        assert self.bias is not None, "the layer has no bias"
        part = self.bias_of(projection)[NAME_OF_BIAS].cut(value, projection)
        self.bias[rows_of(projection)].copy_(projection.ordered(part))

    def keep_scales(self, rows: slice, scales: torch.Tensor) -> None:
        """Takes the scales of some outputs, [rows, groups], in a dtype that all of them fit."""
        known = self._scale_dtype
        self._scale_dtype = scales.dtype if known is None else torch.promote_types(known, scales.dtype)
        self._scales = self._scales.to(self._scale_dtype)
        self._scales[rows].copy_(scales)

    def finish(self) -> None:
        """Brings the weight into the kernels' order, a layer at a time."""
        inputs = self._layer.in_features
        self.weight = pack_quantized(self._pairs, self._scales, self._zeros, self._number, self._group, inputs)
        del self._pairs, self._scales, self._zeros

    def packed_layer(self) -> PackedLayer:
        """After `finish`: what a kernel that takes all experts reads."""
        return PackedLayer(self.weight, self.bias, self._rounding, self._input_scale, self._input_zero)

    def widened(self) -> torch.Tensor:
        """In place of `finish`: the weight [out, in] in the layer's dtype. The method keeps nothing."""
        self.finish()
        wide = dequantized(self.weight).to(self._layer.dtype)
        del self.weight
        return wide

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in] → [n, out]; a row's result does not depend on the others."""
        if self._rounding is not None:
            x = self._round(x, self._rounding, self._input_scale, self._input_zero)
        return self._linear(x, self.weight, self.bias)


def rows_of(projection: Projection) -> slice:
    """The rank's outputs of a projection among the layer's."""
    return slice(projection.offset, projection.offset + projection.outputs.size)
