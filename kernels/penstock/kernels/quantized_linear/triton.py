"""The linear layer over a weight of eight or four bits on a GPU, from the same packed form as on a CPU.

    program (tile of rows, tile of outputs):   for each group:   total += scale · (x · (numbers - zero point))

Numbers become the activations' dtype in registers, exactly, and are multiplied as they are; a group's scale multiplies its sum,
in float32. Nothing of the weight is written back in more bits. In four bits a byte holds two inputs' numbers, of which each
meets a half of x.
"""

# pyright: reportCallIssue=false
# Triton types a launch without its options.

import torch
import triton
import triton.language as tl

from penstock.kernels.dependent_launch import early, wait
from penstock.kernels.quantized_linear.launch import block_of, launch_of
from penstock.kernels.quantized_linear.reference import LANES, NUMBERS, STEP, Number, QuantizedWeight

_INT8, _INT4, _E4M3 = (tl.constexpr(NUMBERS.index(number)) for number in ("int8", "int4", "e4m3"))
_LANES, _STEP = tl.constexpr(LANES), tl.constexpr(STEP)
UNITS: dict[Number, float] = {"int8": 1.0, "int4": 1.0, "e4m3": 2.0**8, "e2m1": 2.0**14}
"""What a number is multiplied by after its bits have been read as those of a float16, whose exponents have a greater bias."""


@triton.jit
def _numbers(codes, zero, NUMBER: tl.constexpr, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """Bytes as numbers, each divided by its unit; HIGH: those of the upper four bits."""
    wide = codes.to(tl.int32)
    if NUMBER == _INT8:
        found = (wide - zero).to(DTYPE)
    elif NUMBER == _INT4:
        found = ((wide >> 4 if HIGH else (wide << 28) >> 28) - zero).to(DTYPE)
    elif NUMBER == _E4M3:
        found = ((wide << 7) & 0xBF80).to(tl.uint16).to(tl.float16, bitcast=True).to(DTYPE)
    else:
        half = wide >> 4 if HIGH else wide
        found = (((half & 8) << 12) | ((half & 7) << 9)).to(tl.uint16).to(tl.float16, bitcast=True).to(DTYPE)
    return found


@triton.jit
def packed_product(
    rows, there, output, weight, scales, zeros, has_zeros, IN: tl.constexpr, OUT: tl.constexpr, GROUP: tl.constexpr,
    NUMBER: tl.constexpr, UNIT: tl.constexpr, ZEROS: tl.constexpr, TILE: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of inputs times some outputs of a weight, [TILE, OUTPUTS] float32.

    `rows`: where each begins, [TILE]; `there`: whether it is one. `output`: [OUTPUTS]. `has_zeros`: whether this weight has the
    zero points that ZEROS says weights may have.
    """
    dtype: tl.constexpr = rows.dtype.element_ty
    steps: tl.constexpr = (IN + _STEP - 1) // _STEP
    groups: tl.constexpr = (IN + GROUP - 1) // GROUP
    BYTES: tl.constexpr = (NUMBER == _INT8) | (NUMBER == _E4M3)
    inside = output < OUT
    panel, lane = (output // _LANES).to(tl.int64), output % _LANES
    total = tl.zeros((TILE, OUTPUTS), tl.float32)
    for group in range(groups):
        shared = (panel * groups + group) * _LANES + lane
        zero = tl.zeros((1, OUTPUTS), tl.int32)
        if ZEROS:
            zero += tl.load(zeros + shared, inside & has_zeros, 0).to(tl.int32)[None, :]
        part = tl.zeros((TILE, OUTPUTS), tl.float32)
        for first in range(0, GROUP, BLOCK):
            if BYTES:
                at = group * GROUP + first + tl.arange(0, BLOCK)
                seen = (at < (group + 1) * GROUP) & (at < IN)
                inputs = tl.load(rows[:, None] + at[None, :], there[:, None] & seen[None, :], 0.0)
                byte = weight + (panel * steps * _STEP * _LANES + lane)[None, :] + at[:, None] * _LANES
                codes = tl.load(byte, seen[:, None] & inside[None, :], 0)
                part = tl.dot(inputs, _numbers(codes, zero, NUMBER, False, dtype), part, input_precision="ieee")
            else:
                pair = (group * GROUP + first) // 2 + tl.arange(0, BLOCK // 2)
                seen = (2 * pair < (group + 1) * GROUP) & (2 * pair < IN)
                of_step: tl.constexpr = _STEP // 2
                place = (pair // of_step) * of_step * _LANES + pair % of_step
                byte = weight + (panel * steps * of_step * _LANES + lane * of_step)[None, :] + place[:, None]
                codes = tl.load(byte, seen[:, None] & inside[None, :], 0)
                inputs = tl.load(rows[:, None] + 2 * pair[None, :], there[:, None] & seen[None, :], 0.0)
                part = tl.dot(inputs, _numbers(codes, zero, NUMBER, False, dtype), part, input_precision="ieee")
                second = seen & (2 * pair + 1 < IN)
                inputs = tl.load(rows[:, None] + 2 * pair[None, :] + 1, there[:, None] & second[None, :], 0.0)
                part = tl.dot(inputs, _numbers(codes, zero, NUMBER, True, dtype), part, input_precision="ieee")
        total += part * (tl.load(scales + shared, inside, 0.0).to(tl.float32) * UNIT)[None, :]
    return total


@triton.jit(do_not_specialize=["count"])
def _quantized_linear_kernel(
    x, weight, scales, zeros, bias, out, count, x_stride, IN: tl.constexpr, OUT: tl.constexpr, GROUP: tl.constexpr,
    NUMBER: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    there, wide = row < count, row.to(tl.int64)
    total = packed_product(
        x + wide * x_stride, there, output, weight, scales, zeros, True, IN, OUT, GROUP, NUMBER, UNIT, zeros is not None,
        TILE, OUTPUTS, BLOCK,
    )  # fmt: skip
    if bias is not None:
        total += tl.load(bias + output, output < OUT, 0.0).to(tl.float32)[None, :]
    tl.store(out + wide[:, None] * OUT + output[None, :], total, there[:, None] & (output < OUT)[None, :])


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """See the reference; rows of x may lie apart. A row's last bits may depend on the number of others."""
    out = x.new_empty(x.shape[0], weight.out_features)
    if not len(x):
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    launch = launch_of(len(x), x.dtype is torch.float32)
    grid = (triton.cdiv(len(x), launch.rows), triton.cdiv(weight.out_features, launch.outputs))
    _quantized_linear_kernel[grid](
        *(x, weight.values, weight.scales, weight.zeros, bias, out, len(x), x.stride(0)),
        IN=weight.in_features,
        OUT=weight.out_features,
        GROUP=weight.group,
        NUMBER=NUMBERS.index(weight.number),
        UNIT=UNITS[weight.number],
        TILE=launch.rows,
        OUTPUTS=launch.outputs,
        BLOCK=block_of(launch, weight.group),
        **early(x.device),
        num_warps=launch.warps,
    )
    return out
