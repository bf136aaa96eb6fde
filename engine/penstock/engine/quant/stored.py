"""Tensors of quantized checkpoints: their shapes, and how a rank's part of each becomes the kernels' numbers.

All forms end as one number, one scale and perhaps one zero point for each output and group of inputs, so that one family of
kernels serves them all. The formats are described in the documentation of compressed-tensors, AutoAWQ, GPTQModel and, for MXFP4,
the OCP Microscaling Formats specification 1.0.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch

from penstock.engine.models.layers.projection import FLOATS, Axis, Projection, TensorSpec
from penstock.engine.quant.scheme import WeightScheme
from penstock.kernels.quantized_linear.reference import Number

Role = Literal["values", "scales", "zeros", "input_scale", "input_zero", "check"]
OF_OUTPUTS: tuple[Role, ...] = ("values", "scales", "zeros")
"""What each output has of its own."""
INT32 = (torch.int32,)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of each four bits of a word, the lowest first."""
E8M0_BIAS, E8M0_NAN = 127, 255


class Stored(NamedTuple):
    """One tensor of a projection."""

    role: Role
    spec: TensorSpec
    decode: Callable[[torch.Tensor], torch.Tensor]
    """The rank's part as it is stored → [outputs, inputs] or [outputs, groups] of the rank; numbers as int8 bits.

    Of a tensor with the role `check`: the whole tensor → itself, or ValueError.
    """


def number(scheme: WeightScheme) -> Number:
    """What the kernels multiply by."""
    if scheme.form == "mxfp4-pack-quantized":
        return "e2m1"
    if scheme.form == "float-quantized":
        return "e4m3"
    return "int4" if scheme.bits == 4 else "int8"


def stored_tensors(scheme: WeightScheme, projection: Projection) -> dict[str, Stored]:
    """What a checkpoint holds for a projection's weight, by name."""
    found = _FORMS[scheme.form](scheme, projection)
    activations = scheme.activations
    if activations is not None and not activations.dynamic:
        found["input_scale"] = Stored("input_scale", TensorSpec((1,)), _as_it_is)
        if not activations.symmetric:
            found["input_zero_point"] = Stored("input_zero", TensorSpec((1,), (torch.int8, torch.int32)), _as_it_is)
    return found


def _packed(scheme: WeightScheme, projection: Projection) -> dict[str, Stored]:
    """Whole numbers in words of 32 bits, the first in the lowest bits; zero points packed along the outputs."""
    (rows, columns), each = projection.shape, 32 // scheme.bits
    words = TensorSpec((rows, -(-columns // each)), INT32, outputs=Axis(0), inputs=Axis(1, each))

    def values(words: torch.Tensor) -> torch.Tensor:
        return signed(unpacked(words, scheme.bits).flatten(1)[:, : projection.inputs.size], scheme.bits)

    found = {
        "weight_packed": Stored("values", words, values),
        "weight_scale": _scale(scheme, projection),
        "weight_shape": Stored("check", TensorSpec((2,), (torch.int64, torch.int32)), _shape_check(projection)),
    }
    if not scheme.symmetric:
        shape = (-(-rows // each), _groups(scheme, columns))
        spec = TensorSpec(shape, INT32, outputs=Axis(0, each), inputs=_group_axis(scheme, 1))

        def zeros(words: torch.Tensor) -> torch.Tensor:
            along_outputs = unpacked(words.T, scheme.bits).flatten(1).T
            return signed(along_outputs[: projection.outputs.size], scheme.bits)

        found["weight_zero_point"] = Stored("zeros", spec, zeros)
    return found


def _bytes(scheme: WeightScheme, projection: Projection) -> dict[str, Stored]:
    """A byte for each number: signed, or E4M3."""
    dtype = torch.int8 if scheme.form == "int-quantized" else torch.float8_e4m3fn
    weight = TensorSpec(projection.shape, (dtype,), outputs=Axis(0), inputs=Axis(1))
    scale = scheme.scale
    found = {"weight": Stored("values", weight, _bits), scale: _scale(scheme, projection)}
    if not scheme.symmetric:
        spec = found[scale].spec._replace(dtypes=(torch.int8,))
        found["weight_zero_point"] = Stored("zeros", spec, found[scale].decode)
    return found


def _mxfp4(scheme: WeightScheme, projection: Projection) -> dict[str, Stored]:
    """Two E2M1 numbers in a byte, the first in the low half; scales are powers of two in E8M0."""
    rows, columns = projection.shape
    pairs = TensorSpec((rows, columns // 2), (torch.uint8,), outputs=Axis(0), inputs=Axis(1, 2))
    scales = TensorSpec((rows, columns // 32), (torch.uint8, torch.float8_e8m0fnu), outputs=Axis(0), inputs=Axis(1, 32))

    def values(packed: torch.Tensor) -> torch.Tensor:
        return torch.stack((packed & 15, packed >> 4), 2).flatten(1).view(torch.int8)

    return {"weight_packed": Stored("values", pairs, values), "weight_scale": Stored("scales", scales, from_e8m0)}


def _awq(scheme: WeightScheme, projection: Projection) -> dict[str, Stored]:
    """Inputs × outputs; eight outputs to a word, in an order of AWQ's own."""
    rows, columns = projection.shape
    order = torch.tensor([AWQ_ORDER.index(column) for column in range(8)])

    def values(words: torch.Tensor) -> torch.Tensor:
        return signed(unpacked(words, 4)[..., order].flatten(1).T, 4)

    groups, axis = _groups(scheme, columns), _group_axis(scheme, 0)
    words = TensorSpec((columns, rows // 8), INT32, outputs=Axis(1, 8), inputs=Axis(0))
    scales = TensorSpec((groups, rows), FLOATS, outputs=Axis(1), inputs=axis)
    zeros = TensorSpec((groups, rows // 8), INT32, outputs=Axis(1, 8), inputs=axis)
    found = {"qweight": Stored("values", words, values), "scales": Stored("scales", scales, torch.t)}
    return found if scheme.symmetric else found | {"qzeros": Stored("zeros", zeros, values)}


def _gptq(scheme: WeightScheme, projection: Projection) -> dict[str, Stored]:
    """Inputs × outputs; inputs are packed into words, zero points' outputs too."""
    (rows, columns), bits, each = projection.shape, scheme.bits, 32 // scheme.bits
    groups, axis, size = _groups(scheme, columns), _group_axis(scheme, 0), scheme.group or columns

    def values(words: torch.Tensor) -> torch.Tensor:
        return signed(unpacked(words.T, bits).flatten(1), bits)

    def zeros(words: torch.Tensor) -> torch.Tensor:
        codes = unpacked(words, bits).flatten(1).T
        return signed((codes.int() + scheme.zeros_less_one) & (2**bits - 1), bits)

    def in_order(groups_of_inputs: torch.Tensor) -> torch.Tensor:
        if not torch.equal(groups_of_inputs.long().cpu(), torch.arange(columns) // size):
            raise ValueError("assigns inputs to groups out of order (act-order), which is not supported")
        return groups_of_inputs

    packed = TensorSpec((columns // each, rows), INT32, outputs=Axis(1), inputs=Axis(0, each))
    packed_zeros = TensorSpec((groups, rows // each), INT32, outputs=Axis(1, each), inputs=axis)
    return {
        "qweight": Stored("values", packed, values),
        "scales": Stored("scales", TensorSpec((groups, rows), FLOATS, outputs=Axis(1), inputs=axis), torch.t),
        "qzeros": Stored("zeros", packed_zeros, zeros),
        "g_idx": Stored("check", TensorSpec((columns,), INT32), in_order),
    }


_FORMS: Mapping[str, Callable[[WeightScheme, Projection], dict[str, Stored]]] = {
    "pack-quantized": _packed,
    "int-quantized": _bytes,
    "float-quantized": _bytes,
    "mxfp4-pack-quantized": _mxfp4,
    "awq": _awq,
    "gptq": _gptq,
}


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [a, b] → uint8 [a, b, numbers of a word], the one in the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(2) >> shifts) & (2**bits - 1)).to(torch.uint8)


def signed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers from 0 → int8 around 0: half of their range is subtracted."""
    return (codes.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)


def from_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Powers of two by their exponent plus 127, in bfloat16; 255 is not a number."""
    exponents = codes.view(torch.uint8).int()
    powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents - E8M0_BIAS)
    return torch.where(exponents == E8M0_NAN, torch.nan, powers).to(torch.bfloat16)


def _scale(scheme: WeightScheme, projection: Projection) -> Stored:
    """One for all, or [outputs, groups], or [blocks of outputs, groups]."""
    (rows, columns), each = projection.shape, scheme.outputs
    if each is None:
        size = projection.outputs.size
        return Stored("scales", TensorSpec((1,)), lambda scale: scale.view(1, 1).expand(size, 1))
    shape = (-(-rows // each), _groups(scheme, columns))
    spec = TensorSpec(shape, FLOATS, outputs=Axis(0, each, shared=True), inputs=_group_axis(scheme, 1))
    first = projection.outputs.start % each

    def of_outputs(scales: torch.Tensor) -> torch.Tensor:
        return scales.repeat_interleave(each, 0)[first : first + projection.outputs.size]

    return Stored("scales", spec, of_outputs)


def _groups(scheme: WeightScheme, columns: int) -> int:
    return 1 if scheme.group is None else -(-columns // scheme.group)


def _group_axis(scheme: WeightScheme, dim: int) -> Axis | None:
    return None if scheme.group is None else Axis(dim, scheme.group)


def _shape_check(projection: Projection) -> Callable[[torch.Tensor], torch.Tensor]:
    def check(shape: torch.Tensor) -> torch.Tensor:
        if tuple(shape.tolist()) != projection.shape:
            raise ValueError(f"is {shape.tolist()}, and the layer has {list(projection.shape)}")
        return shape

    return check


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int8)


def _as_it_is(value: torch.Tensor) -> torch.Tensor:
    return value
