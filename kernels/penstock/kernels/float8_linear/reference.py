"""A linear layer whose weight and inputs are both E4M3, multiplied by a device's own instructions.

A device may add products up with fewer bits than float32 has, and in an order that changes with the number of rows: the last bits
of a row's result depend on both.
"""

from typing import NamedTuple

import torch

from penstock.kernels.quantized_linear.rounding import Rounding, input_numbers

MULTIPLE = 16
"""Of inputs and of outputs: what the instructions take."""


class Float8Weight(NamedTuple):
    """A weight [out, in]: each number times its output's scale."""

    values: torch.Tensor
    """[out, in] float8_e4m3fn."""
    scales: torch.Tensor
    """[1, out] float32."""

    @property
    def nbytes(self) -> int:
        """Bytes of numbers and scales."""
        return self.values.nbytes + self.scales.nbytes


def takes(number: str, rule: Rounding | None, group: int, out_features: int, in_features: int) -> bool:
    """Whether a weight of such numbers and inputs that are rounded so meet in eight bits; `group` inputs share a scale."""
    if rule is None or rule.number != "float8" or rule.group is not None:
        return False
    return number == "e4m3" and group >= in_features and not out_features % MULTIPLE and not in_features % MULTIPLE


def pack_float8(values: torch.Tensor, scales: torch.Tensor) -> Float8Weight:
    """The weight as the device wants it.

    Args:
        values: int8 [out, in]: the numbers' bits.
        scales: [out, 1].
    """
    return Float8Weight(values.contiguous().view(torch.float8_e4m3fn), scales.float().T.contiguous())


def float8_numbers(x: torch.Tensor, rule: Rounding, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers that inputs are rounded to.

    Args:
        x: [n, in].
        rule: How: to E4M3, with one scale for a token or for the layer.
        scale: [1] float32, of a rule that is not dynamic; else None.

    Returns:
        [n, in] float8_e4m3fn and [n, 1] float32: a number times its scale is the rounded input.
    """
    numbers, scales = input_numbers(x, rule, scale)
    return numbers.flatten(1).to(torch.float8_e4m3fn), scales.flatten(1).expand(len(x), 1).contiguous()


def float8_linear(
    x: torch.Tensor, weight: Float8Weight, rule: Rounding, scale: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """x, rounded to E4M3, · weightᵀ + bias.

    Args:
        x: [n, in].
        weight: From `pack_float8`.
        rule: How x is rounded; see `takes`.
        scale: [1] float32, of a rule that is not dynamic; else None.
        bias: [out] or None.

    Returns:
        [n, out] in x's dtype; sums are in float32.
    """
    numbers, scales = float8_numbers(x, rule, scale)
    out = (numbers.float() @ weight.values.float().T) * scales * weight.scales
    return (out if bias is None else out + bias.float()).to(x.dtype)


def scaled_product(
    numbers: torch.Tensor, scales: torch.Tensor, weight: Float8Weight, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The product of `float8_linear` by `torch._scaled_mm`, which calls cuBLASLt or CUTLASS on a GPU.

    Args:
        numbers: [n, in], from `float8_numbers`.
        scales: [n, 1].
        weight: From `pack_float8`.
        bias: [out] or None, in `dtype`.
        dtype: Of the result [n, out]: bfloat16 on a GPU.
    """
    if not len(numbers):
        return numbers.new_empty((0, len(weight.values)), dtype=dtype)
    return torch._scaled_mm(numbers, weight.values.T, scales, weight.scales, bias=bias, out_dtype=dtype)  # pyright: ignore[reportPrivateImportUsage]
