"""A linear layer over a weight of eight or four bits, packed once for the kernels."""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

LANES = 16
"""Outputs that stand side by side in a packed weight."""
STEP = 8
"""Inputs of a step, which kernels read together."""

Number = Literal["int8", "int4", "e4m3", "e2m1"]
"""What a weight's numbers are: signed whole numbers, or floating-point numbers of OCP's formats E4M3 (FP8) and E2M1 (MXFP4)."""
NUMBERS: tuple[Number, ...] = ("int8", "int4", "e4m3", "e2m1")
"""In the order in which the compiled kernel numbers them."""
Quantizable = Literal["int8", "int4", "e4m3"]
"""What `quantize` makes."""
AT_ONCE = 1 << 18
"""Numbers that `quantize` divides at once: their float32 is all that it takes beside its result."""
LARGEST: dict[Quantizable, float] = {"int8": 127.5, "int4": 7.5, "e4m3": 448.0}
"""The steps that the largest magnitude of a block is."""
SCALES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The compiled kernel's numbers for the dtypes of scales."""
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The value of each E2M1 code."""


class QuantizedWeight(NamedTuple):
    """A weight [out, in]: each number, less its group's zero point, times its group's scale."""

    values: torch.Tensor
    """int8: the numbers' bits, of whole steps of eight inputs. Inputs after the last are 0.

    [⌈out / 16⌉, steps, 8, 16] in eight bits: a byte for each input of a step and each output. [⌈out / 16⌉, steps, 16, 4] in four
    bits: a word of 32 bits for each output, with the first input in the lowest bits.
    """
    scales: torch.Tensor
    """[⌈out / 16⌉, groups, 16]; float32, bfloat16 or float16."""
    zeros: torch.Tensor | None
    """[⌈out / 16⌉, groups, 16] int8. None: all are 0."""
    number: Number
    group: int
    """Inputs that share a scale: whole steps, or all inputs. The last group may be shorter."""
    out_features: int
    in_features: int

    @property
    def nbytes(self) -> int:
        """Bytes of values, scales and zero points."""
        return self.values.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)


def bits(number: Number) -> Literal[4, 8]:
    """How many bits a number takes."""
    return 8 if number in ("int8", "e4m3") else 4


def quantize(
    weight: torch.Tensor, number: Quantizable, group: int, scale_dtype: torch.dtype, outputs: int | None = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest numbers, symmetric around zero, and their scales.

    A scale is the largest magnitude of its block divided by 127.5, 7.5 or 448 (E4M3), rounded to its dtype. Numbers are rounded
    half to even and cut to their range. A block without any value but zero has scale 1.

    Args:
        weight: [out, in].
        number: What its numbers become.
        group: Inputs that share a scale. The last group may be shorter.
        scale_dtype: Of the scales.
        outputs: Outputs that share a scale; None: all. The last of them may be fewer.

    Returns:
        The numbers' bits, int8 [out, in], and each output's scales [out, ⌈in / group⌉]. A scale is not finite where its block is
        not.
    """
    rows, inputs = weight.shape
    tall = rows if outputs is None else outputs
    blocks = padded(weight, -inputs % group, -rows % tall).unflatten(1, (-1, group)).unflatten(0, (-1, tall))
    scales = (torch.maximum(blocks.amax((1, 3)), -blocks.amin((1, 3))).float() / LARGEST[number]).to(scale_dtype)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales).repeat_interleave(tall, 0)[:rows]
    values = torch.empty(rows, inputs, dtype=torch.int8, device=weight.device)
    for some in torch.arange(rows).split(max(AT_ONCE // inputs, 1)):
        part = slice(int(some[0]), int(some[-1]) + 1)
        divisors = scales[part].float().repeat_interleave(group, 1)[:, :inputs]
        values[part] = _rounded(weight[part].float() / divisors, number)
    return values, scales


def padded(values: torch.Tensor, inputs: int, outputs: int) -> torch.Tensor:
    """The same with so many zeros after the inputs, which run along dimension 1, and the outputs; itself where there are none."""
    if not inputs and not outputs:
        return values
    return F.pad(values, (*[0] * 2 * (values.ndim - 2), 0, inputs, 0, outputs))


def _rounded(steps: torch.Tensor, number: Quantizable) -> torch.Tensor:
    """float32 → the nearest numbers' bits in int8; the argument is overwritten."""
    if number == "e4m3":
        return steps.clamp_(-LARGEST[number], LARGEST[number]).to(torch.float8_e4m3fn).view(torch.int8)
    most = 2 ** (bits(number) - 1)
    return steps.round_().clamp_(-most, most - 1).to(torch.int8)


def pair_up(values: torch.Tensor, number: Number) -> torch.Tensor:
    """Pairs of inputs' bits.

    Args:
        values: int8 [out, in], a number's bits in each; of four bits, the lower half counts.
        number: What they are.

    Returns:
        int8 [out, pairs of inputs, bytes of a pair]; a missing last input is 0.
    """
    pairs = padded(values, values.shape[1] % 2, 0).unflatten(1, (-1, 2))
    if bits(number) == 8:
        return pairs
    return ((pairs[..., :1] & 15) | (pairs[..., 1:] << 4)).contiguous()


def pack_quantized(
    pairs: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, number: Number, group: int, in_features: int
) -> QuantizedWeight:
    """Brings a weight into the kernels' order.

    Args:
        pairs: From `pair_up`.
        scales: [out, groups].
        zeros: int8 [out, groups], subtracted from whole numbers before they are scaled; None: all are 0.
        number: What the weight's numbers are.
        group: Inputs that share a scale: a multiple of STEP, or `in_features` or more.
        in_features: Of the weight.
    """
    if group % STEP and group < in_features:
        raise ValueError(f"groups of {group} inputs are no whole steps of {STEP}")
    together = STEP * bits(number) // 8
    codes = pairs.flatten(1)
    steps = padded(codes, -codes.shape[1] % together, -len(pairs) % LANES).unflatten(1, (-1, together)).unflatten(0, (-1, LANES))
    panels = steps.permute(0, 2, 3, 1) if bits(number) == 8 else steps.transpose(1, 2)
    packed_zeros = None if zeros is None or not zeros.any() else panels_of_groups(zeros)
    return QuantizedWeight(panels.contiguous(), panels_of_groups(scales), packed_zeros, number, group, len(pairs), in_features)


def dequantized(weight: QuantizedWeight) -> torch.Tensor:
    """The weight [out, in] in float32."""
    if bits(weight.number) == 8:
        steps = weight.values.permute(0, 3, 1, 2)
    else:
        halves = torch.stack(((weight.values << 4) >> 4, weight.values >> 4), -1)
        steps = halves.flatten(3).transpose(1, 2)
    codes = steps.flatten(2).flatten(0, 1)[: weight.out_features, : weight.in_features]
    values = _decoded(codes, weight.number)
    if weight.zeros is not None:
        values = values - _of_inputs(weight.zeros, weight)
    return values * _of_inputs(weight.scales, weight)


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x · weightᵀ + bias. In a compiled form a row's result has the same bits whatever the other rows are.

    Args:
        x: [n, in].
        weight: From `pack_quantized`.
        bias: [out] or None.

    Returns:
        [n, out] in x's dtype; sums are in float32.
    """
    out = x.float() @ dequantized(weight).T
    return (out if bias is None else out + bias.float()).to(x.dtype)


def panels_of_groups(of_groups: torch.Tensor) -> torch.Tensor:
    """What outputs have for each group, [out, groups] → [⌈out / 16⌉, groups, 16]."""
    return F.pad(of_groups, (0, 0, 0, -len(of_groups) % LANES)).unflatten(0, (-1, LANES)).transpose(1, 2).contiguous()


def _of_inputs(panels: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """A value of each group → float32 [out, in]."""
    values = panels.float().transpose(1, 2).flatten(0, 1)[: weight.out_features]
    return values.repeat_interleave(weight.group, 1)[:, : weight.in_features]


def _decoded(codes: torch.Tensor, number: Number) -> torch.Tensor:
    """int8 → float32."""
    if number == "e4m3":
        return codes.contiguous().view(torch.float8_e4m3fn).float()
    if number == "e2m1":
        return E2M1.to(codes.device)[(codes & 15).long()]
    return codes.float()
