"""A linear layer over a weight of eight or four bits, packed once for the kernels."""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

LANES = 16
"""Outputs that stand side by side in a packed weight."""

Bits = Literal[4, 8]


class QuantizedWeight(NamedTuple):
    """A weight [out, in] as signed whole numbers times scales."""

    values: torch.Tensor
    """[⌈out / 16⌉, pairs of inputs, bytes of a pair, 16] int8.

    A pair takes two bytes in eight bits. In four bits it takes one, with the first input in the low half.
    """
    scales: torch.Tensor
    """[⌈out / 16⌉, groups, 16], float32 or bfloat16."""
    bits: Bits
    group: int
    """Inputs that share a scale; even."""
    out_features: int
    in_features: int

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes


def quantize(weight: torch.Tensor, bits: Bits, group: int, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest whole numbers, symmetric around zero, and their scales.

    A scale is the largest magnitude of its group divided by 127.5 or 7.5, rounded to its dtype. Numbers are rounded half to even
    and cut to the range of their bits. A group without any value but zero has scale 1.

    Args:
        weight: [out, in]; `in` is a multiple of `group`.
        bits: Of a number.
        group: Inputs that share a scale.
        scale_dtype: Of the scales.

    Returns:
        int8 [out, in] and scales [out, in / group]. A scale is not finite where its group is not.
    """
    grouped = weight.float().unflatten(1, (-1, group))
    largest = 2 ** (bits - 1)
    scales = (grouped.abs().amax(2) / (largest - 0.5)).to(scale_dtype)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    values = (grouped / scales.float().unsqueeze(2)).round_().clamp_(-largest, largest - 1)
    return values.to(torch.int8).flatten(1), scales


def pair_up(values: torch.Tensor, bits: Bits) -> torch.Tensor:
    """int8 [out, in] → [out, pairs of inputs, bytes of a pair]; a missing last input is 0."""
    pairs = F.pad(values, (0, values.shape[1] % 2)).unflatten(1, (-1, 2))
    if bits == 8:
        return pairs
    return ((pairs[..., :1] & 15) | (pairs[..., 1:] << 4)).contiguous()


def pack_quantized(pairs: torch.Tensor, scales: torch.Tensor, bits: Bits, group: int, in_features: int) -> QuantizedWeight:
    """Brings a weight into the kernels' order.

    Args:
        pairs: From `pair_up`.
        scales: [out, groups].
        bits: Of a number.
        group: Inputs that share a scale; for one scale of all inputs, `in_features` or one more, whichever is even.
        in_features: Of the weight.
    """
    missing = -len(pairs) % LANES
    panels = F.pad(pairs, (0, 0, 0, 0, 0, missing)).unflatten(0, (-1, LANES)).permute(0, 2, 3, 1).contiguous()
    scales_of_panels = F.pad(scales, (0, 0, 0, missing)).unflatten(0, (-1, LANES)).transpose(1, 2).contiguous()
    return QuantizedWeight(panels, scales_of_panels, bits, group, len(pairs), in_features)


def dequantized(weight: QuantizedWeight) -> torch.Tensor:
    """The weight [out, in] in float32: each number times its scale."""
    panels = weight.values
    if weight.bits == 4:
        panels = torch.cat(((panels << 4) >> 4, panels >> 4), 2)
    values = panels.permute(0, 3, 1, 2).flatten(2).flatten(0, 1)[: weight.out_features, : weight.in_features]
    scales = weight.scales.float().transpose(1, 2).flatten(0, 1)[: weight.out_features]
    return values.float() * scales.repeat_interleave(weight.group, 1)[:, : weight.in_features]


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
