"""Linear layers of up to 16 rows on a GPU, with norms, gates and the residual stream in the same launch.

A program takes some outputs, of which it reads the weights once, and all inputs: so nothing is added up between programs, and a
row's bits depend on that row alone. The norm's root mean square is a factor of a whole row, so that it is applied last; its sum
of squares is taken while the inputs pass by.
"""

# pyright: reportCallIssue=false
# Triton types a launch without its options.

import torch
import triton
import triton.language as tl
from triton import knobs

from penstock.kernels.dependent_launch import LINE, early, prefetch, wait
from penstock.kernels.few_rows.reference import MAX_ROWS, Activation

UPCAST = knobs.runtime.interpret
"""Whether products are taken in float32: Triton's interpreter multiplies bfloat16 wrongly. Never in what is compiled."""
_PROGRAMS = 128
"""So many at least, that nearly every multiprocessor has one, unless they would have fewer than 16 outputs each."""
_TILE = 4096
"""Weights that a program reads at a time: 8 KiB in half precision, of which four are on their way."""
_STAGES = 5
_LINES_AHEAD = 4 * 2 * _TILE // LINE
"""Of weights that a program asks for before its inputs are there: as many as are on their way later."""


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["rows"])
def _few_rows_kernel(
    out, x, norm, weight, bias, residual, rows, eps,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GATE: tl.constexpr, GELU: tl.constexpr, UPCAST: tl.constexpr, AHEAD: tl.constexpr,
    LINES: tl.constexpr, NORM_LINES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of OUTPUTS outputs of x times weight; with GATE the weights of as many more come after them."""
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first_lines = tl.minimum(output, OUTPUTS - 1)[:, None].to(tl.int64) * INPUTS
    first_lines += tl.minimum(tl.arange(0, LINES) * AHEAD, INPUTS - 1)[None, :]
    prefetch(weight + first_lines, EARLY)
    if GATE:
        prefetch(weight + OUTPUTS * INPUTS + first_lines, EARLY)
    if norm is not None:
        prefetch(norm + tl.minimum(tl.arange(0, NORM_LINES) * 32, INPUTS - 1), EARLY)
    wait(EARLY)
    is_row = row < rows
    MASKED: tl.constexpr = OUTPUTS % BLOCK_N != 0 or INPUTS % BLOCK_K != 0
    acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
    up = tl.zeros([ROWS, BLOCK_N], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for first in range(0, INPUTS, BLOCK_K):
        at = first + tl.arange(0, BLOCK_K)
        there = is_row[:, None] & (at < INPUTS)[None, :] if MASKED else is_row[:, None] & (at >= 0)[None, :]
        value = tl.load(x + row[:, None] * INPUTS + at[None, :], there, 0.0)
        if norm is not None:
            wide = value.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            scale = tl.load(norm + at, at < INPUTS, 0.0) if MASKED else tl.load(norm + at)
            value = (wide * scale[None, :]).to(value.dtype)
        if UPCAST:
            value = value.to(tl.float32)
        weights = output[None, :].to(tl.int64) * INPUTS + at[:, None]
        real = (output < OUTPUTS)[None, :] & (at < INPUTS)[:, None]
        of_output = tl.load(weight + weights, real, 0.0) if MASKED else tl.load(weight + weights)
        if UPCAST:
            of_output = of_output.to(tl.float32)
        acc = tl.dot(value, of_output, acc, input_precision="tf32x3")
        if GATE:
            half = weight + OUTPUTS * INPUTS
            of_up = tl.load(half + weights, real, 0.0) if MASKED else tl.load(half + weights)
            if UPCAST:
                of_up = of_up.to(tl.float32)
            up = tl.dot(value, of_up, up, input_precision="tf32x3")
    is_output = output < OUTPUTS
    if norm is not None:
        factor = tl.rsqrt(squares / INPUTS + eps)[:, None]
        acc = acc * factor
        up = up * factor
    if bias is not None:
        acc += tl.load(bias + output, is_output, 0.0).to(tl.float32)[None, :]
        if GATE:
            up += tl.load(bias + OUTPUTS + output, is_output, 0.0).to(tl.float32)[None, :]
    if GATE:
        # (1 + tanh(z)) / 2 = sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x³).
        scaled = 1.5957691216057308 * (acc + 0.044715 * acc * acc * acc) if GELU else acc
        acc = acc * tl.sigmoid(scaled) * up
    place = row[:, None].to(tl.int64) * OUTPUTS + output[None, :]
    written = is_row[:, None] & is_output[None, :]
    if residual is not None:
        acc += tl.load(residual + place, written, 0.0).to(tl.float32)
    tl.store(out + place, acc, written)


def norm_linear(x: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See the reference; x of float32 or bfloat16, whose range holds what is not normalised yet."""
    return _launch(x, weight, bias, norm=norm, eps=eps)


def norm_gated_linear(
    x: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
) -> torch.Tensor:
    """See the reference, and `norm_linear`."""
    return _launch(x, weight, bias, norm=norm, eps=eps, gate=True, gelu=activation == "gelu_tanh")


def linear_add(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
    """See the reference."""
    return _launch(x, weight, bias, residual=residual)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gate: bool = False,
    gelu: bool = False,
) -> torch.Tensor:
    rows, inputs = x.shape
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows, where there may be {MAX_ROWS}")
    outputs = weight.shape[0] // 2 if gate else weight.shape[0]
    out = x.new_empty(rows, outputs)
    if not rows:
        return out
    block_n = next((size for size in (64, 32) if outputs // size >= _PROGRAMS), 16)
    block_k = max(64, _TILE // (2 * block_n if gate else block_n)) * 2 // x.element_size()
    _few_rows_kernel[(triton.cdiv(outputs, block_n),)](
        *(out, x, norm, weight, bias, residual, rows, eps),
        INPUTS=inputs, OUTPUTS=outputs, ROWS=MAX_ROWS, BLOCK_N=block_n, BLOCK_K=block_k, GATE=gate, GELU=gelu, UPCAST=UPCAST,
        AHEAD=LINE // weight.itemsize, LINES=_LINES_AHEAD // (2 * block_n if gate else block_n),
        NORM_LINES=triton.next_power_of_2(triton.cdiv(inputs, 32)), **early(x.device),
        num_warps=4, num_stages=_STAGES,
    )  # fmt: skip
    return out
