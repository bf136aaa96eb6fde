"""Rounds a linear layer's inputs to E4M3 on a GPU, and has them multiplied. A program takes a token: it finds the scale, then
rounds what it reads a second time, from the cache."""

# pyright: reportCallIssue=false
# Triton types a launch without its options.

import torch
import triton
import triton.language as tl

from penstock.kernels.dependent_launch import early, wait
from penstock.kernels.float8_linear.reference import Float8Weight, scaled_product
from penstock.kernels.prepare_kv.triton import kept, magnitude
from penstock.kernels.quantized_linear.rounding import FLOAT8_MAX, SMALLEST, Rounding

_MOST_BLOCK = 2048
"""Inputs of a token that are read at once: four loads of 16 bytes for each thread, in half precision."""
_LARGEST, _SMALLEST = tl.constexpr(FLOAT8_MAX), tl.constexpr(SMALLEST)
_INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def _float8_numbers_kernel(
    x, scale, numbers, scales, x_stride, IN: tl.constexpr, BLOCK: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    if scale is None:
        most = tl.zeros([BLOCK], tl.int32)
        for first in range(0, IN, BLOCK):
            value = tl.load(x + row * x_stride + first + at, first + at < IN, 0.0).to(tl.float32)
            most = tl.maximum(most, magnitude(value))
        own = tl.div_rn(tl.max(most, 0).to(tl.float32, bitcast=True), _LARGEST * 1.0)
        own = tl.where(own < _SMALLEST, _SMALLEST, own)
        if POWER_OF_TWO:
            bits = own.to(tl.int32, bitcast=True)
            own = tl.where(bits < _INFINITY, (bits + 0x7FFFFF) & _INFINITY, bits).to(tl.float32, bitcast=True)
    else:
        own = tl.load(scale)
    tl.store(scales + row, own)
    for first in range(0, IN, BLOCK):
        value = tl.load(x + row * x_stride + first + at, first + at < IN, 0.0).to(tl.float32)
        tl.store(numbers + row * IN + first + at, kept(value, own, tl.float8e4nv), first + at < IN)


def float8_numbers(x: torch.Tensor, rule: Rounding, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference; rows of x may lie apart."""
    x = x if x.stride(1) == 1 else x.contiguous()
    numbers = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(len(x), 1, dtype=torch.float32)
    if len(x):
        block = min(triton.next_power_of_2(x.shape[1]), _MOST_BLOCK)
        options = {"IN": x.shape[1], "BLOCK": block, "POWER_OF_TWO": rule.power_of_two, **early(x.device), "num_warps": 4}
        _float8_numbers_kernel[len(x),](x, scale, numbers, scales, x.stride(0), **options)
    return numbers, scales


def float8_linear(
    x: torch.Tensor, weight: Float8Weight, rule: Rounding, scale: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """See the reference."""
    return scaled_product(*float8_numbers(x, rule, scale), weight, bias, x.dtype)
