"""Root mean square normalisation on a GPU: a program holds a row in registers, or several where rows are short."""

# pyright: reportCallIssue=false
# Triton types a launch without its options.

import torch
import triton
import triton.language as tl

from penstock.kernels.dependent_launch import LINE, early, prefetch, wait

_ELEMENTS = 1024
"""That a program takes at least, as whole rows."""


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x, residual, weight, out, total, eps, rows, x_stride,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    prefetch(weight + tl.minimum(tl.arange(0, BLOCK // AHEAD) * AHEAD, D - 1), EARLY)
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (at < D)
    value = tl.load(x + row * x_stride + at, inside, 0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * D + at, inside, 0.0).to(tl.float32)
        # What the residual stream keeps is rounded, and it is the rounded sum that is normalised.
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * D + at, rounded, inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / D + eps)
    tl.store(out + row * D + at, value * scale * tl.load(weight + at, at < D, 0.0), inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See the reference; the rows of x, [n, d], may lie apart."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, x, weight, out, out, eps, add=False)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference; the rows of x, [n, d], may lie apart, those of the residual not."""
    out, total = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    _launch(x, residual, weight, out, total, eps, add=True)
    return out, total


def _launch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, total: torch.Tensor, eps: float, add: bool
) -> None:
    size = x.shape[-1]
    x = x.reshape(-1, size)
    rows, block = x.shape[0], triton.next_power_of_2(size)
    if rows:
        together = max(1, _ELEMENTS // block)
        # 16 bytes a thread and load in half precision, up to 16 warps.
        warps = min(16, together * block // 256)
        arguments = (x, residual, weight, out, total, eps, rows, x.stride(0))
        grid = (triton.cdiv(rows, together),)
        ahead = min(block, LINE // weight.itemsize)
        options = {"D": size, "BLOCK": block, "ROWS": together, "ADD": add, "AHEAD": ahead, **early(x.device)}
        _rms_norm_kernel[grid](*arguments, **options, num_warps=warps)
