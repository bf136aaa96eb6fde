"""A linear layer whose weight stays packed in memory, however it came to be quantized."""

import torch

from penstock.engine.config import ConfigError
from penstock.engine.models.layers.linear_method import CPU
from penstock.engine.models.layers.projection import Axis, LinearLayer, Projection, TensorSpec
from penstock.kernels.experts.table import PackedLayer
from penstock.kernels.float8_linear.reference import Float8Weight, pack_float8
from penstock.kernels.float8_linear.reference import takes as takes_float8
from penstock.kernels.integer_linear.reference import IntegerWeight, pack_integers, takes
from penstock.kernels.ops import Ops
from penstock.kernels.quantized_linear.reference import Number, QuantizedWeight, bits, dequantized, pack_quantized
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
        device: Where it lies.
    """

    def __init__(
        self,
        layer: LinearLayer,
        number: Number,
        group: int | None,
        scale_dtype: torch.dtype | None,
        zeros: bool,
        rounding: Rounding | None,
        ops: Ops,
        device: torch.device = CPU,
    ) -> None:
        self.device = device
        self._layer, self._linear = layer, ops.quantized_linear
        self._number: Number = number
        self._group = group or layer.in_features
        self._own_dtype, self._has_zeros = scale_dtype, zeros
        self.bias = torch.empty(layer.out_features, dtype=layer.dtype, device=device) if layer.bias else None
        self._rounding, self._round = rounding, ops.rounded_inputs
        self._input_scale = None if rounding is None or rounding.dynamic else torch.zeros(1, device=device)
        self._input_zero: torch.Tensor | None = None
        self._integers = ops.integer_linear if takes(number, rounding) else None
        # The kernels of experts read numbers of any kind in one order.
        in_eight_bits = not layer.bare and takes_float8(number, rounding, self._group, layer.out_features, layer.in_features)
        self._float8 = ops.float8_linear if in_eight_bits else None
        self._packed: QuantizedWeight | IntegerWeight | Float8Weight | None = None
        self._make_room()

    def _make_room(self) -> None:
        """Takes memory for the numbers as they come from files, until `finish`."""
        rows, inputs = self._layer.out_features, self._layer.in_features
        self._pairs = torch.zeros(rows, (inputs + 1) // 2, bits(self._number) // 4, dtype=torch.int8, device=self.device)
        self._scale_dtype = self._own_dtype
        self._scales = torch.ones(rows, -(-inputs // self._group), dtype=self._scale_dtype, device=self.device)
        self._zeros = torch.zeros(self._scales.shape, dtype=torch.int8, device=self.device) if self._has_zeros else None
        if self._input_scale is not None:
            self._input_scale.zero_()

    def begin(self) -> None:
        """Before each tensor: room for it, also where weights come a second time."""
        if not hasattr(self, "_pairs"):
            self._make_room()

    @property
    def weight(self) -> QuantizedWeight | IntegerWeight | Float8Weight:
        """After `finish`: what the kernels read."""
        assert self._packed is not None, "the weight is not loaded"
        return self._packed

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

    def keep_input_scale(self, scale: torch.Tensor) -> None:
        """Takes a projection's fixed scale of the inputs, [1]: the largest counts."""
        assert self._input_scale is not None, "the scheme rounds no inputs"
        self._input_scale.copy_(torch.maximum(self._input_scale, scale.float()))

    def keep_input_zero(self, zero: torch.Tensor) -> None:
        """Takes the zero point that goes with it."""
        self._input_zero = zero.float() if self._input_zero is None else self._input_zero.copy_(zero)

    def finish(self) -> None:
        """Brings the weight into the kernels' order: into the memory of an earlier one, where graphs read it."""
        packed = self._in_order()
        del self._pairs, self._scales, self._zeros
        if self._packed is None:
            self._packed = packed
            return
        for old, new in zip(self._packed, packed, strict=True):
            kinds = [value.dtype if isinstance(value, torch.Tensor) else value for value in (old, new)]
            if kinds[0] != kinds[1]:
                raise ConfigError(f"{self._layer.name}: its scales or zero points are of another kind than those before")
            if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
                old.copy_(new)

    def _in_order(self) -> QuantizedWeight | IntegerWeight | Float8Weight:
        inputs = self._layer.in_features
        numbers = self._pairs.flatten(1)[:, :inputs]
        if self._float8 is not None:
            return pack_float8(numbers, self._scales)
        if self._integers is None or self._rounding is None:
            return pack_quantized(self._pairs, self._scales, self._zeros, self._number, self._group, inputs)
        return pack_integers(numbers, self._scales, self._zeros, self._group, self._rounding)

    def packed_layer(self) -> PackedLayer:
        """After `finish`: what a kernel that takes all experts reads."""
        assert not isinstance(self.weight, Float8Weight), "no expert's"
        return PackedLayer(self.weight, self.bias, self._rounding, self._input_scale, self._input_zero)

    def held(self) -> list[torch.Tensor]:
        """Its tensors; see MovableMethod."""
        return [tensor for tensor in self.packed_layer().tensors if tensor is not None]

    def widened(self) -> torch.Tensor:
        """In place of `finish`: the weight [out, in] in the layer's dtype. The method keeps nothing."""
        self._integers = None
        self.finish()
        assert isinstance(self.weight, QuantizedWeight)
        wide = dequantized(self.weight).to(self._layer.dtype)
        self._packed = None
        return wide

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in] → [n, out]; a row's result does not depend on the others."""
        if isinstance(self.weight, IntegerWeight):
            assert self._integers is not None and self._rounding is not None
            return self._integers(x, self.weight, self._rounding, self._input_scale, self._input_zero, self.bias)
        if isinstance(self.weight, Float8Weight):
            assert self._float8 is not None and self._rounding is not None
            return self._float8(x, self.weight, self._rounding, self._input_scale, self.bias)
        if self._rounding is not None:
            x = self._round(x, self._rounding, self._input_scale, self._input_zero)
        return self._linear(x, self.weight, self.bias)


def rows_of(projection: Projection) -> slice:
    """The rank's outputs of a projection among the layer's."""
    return slice(projection.offset, projection.offset + projection.outputs.size)
