"""The gate of a gated MLP on a GPU: a program a part of a row, of gate and up projection alike."""

# pyright: reportCallIssue=false
# Triton types a launch without its options.

import torch
import triton
import triton.language as tl

from penstock.kernels.dependent_launch import early, wait

_BLOCK = 1024


@triton.jit
def _gated_mul_kernel(
    gate_up, out, slope, limit, D: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, CLAMPED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * D + at, at < D, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * D + D + at, at < D, 0.0).to(tl.float32)
    scaled = gate
    if CLAMPED:
        # Comparisons, since tl.minimum would drop a NaN.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        scaled = slope * gate
    if GELU:
        # (1 + tanh(z)) / 2 = sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x³).
        scaled = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out + row * D + at, gate * tl.sigmoid(scaled) * up, at < D)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See the reference; contiguous."""
    return _launch(gate_up)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See the reference; contiguous."""
    return _launch(gate_up, gelu=True)


def clamped_swiglu(gate_up: torch.Tensor, slope: float, limit: float) -> torch.Tensor:
    """See the reference; contiguous."""
    return _launch(gate_up, clamp=(slope, limit))


def _launch(gate_up: torch.Tensor, gelu: bool = False, clamp: tuple[float, float] | None = None) -> torch.Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    if rows:
        grid = (rows, triton.cdiv(size, _BLOCK))
        # 16 bytes a thread and load in half precision.
        options = {"D": size, "BLOCK": _BLOCK, "GELU": gelu, "CLAMPED": clamp is not None, **early(out.device)}
        _gated_mul_kernel[grid](gate_up, out, *(clamp or (0.0, 0.0)), **options, num_warps=4)
    return out
