"""Rows of a table by their numbers on a GPU: a program a row, or a part of a long one."""

# pyright: reportCallIssue=false
# Triton types a launch without its options.

import torch
import triton
import triton.language as tl

from penstock.kernels.dependent_launch import early, wait


@triton.jit
def _embedding_kernel(table, ids, out, rows, D: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait(EARLY)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token).to(tl.int64)
    known = (row >= 0) & (row < rows)
    value = tl.load(table + row * D + at, known & (at < D), 0.0)
    tl.store(out + token * D + at, value, at < D)


def embedding(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """See the reference; both contiguous."""
    count, (rows, size) = ids.shape[0], table.shape
    out = table.new_empty(count, size)
    if count:
        block = min(1024, triton.next_power_of_2(size))
        # 16 bytes a thread and load.
        warps = min(8, max(1, block * table.itemsize // 512))
        grid = (count, triton.cdiv(size, block))
        _embedding_kernel[grid](table, ids, out, rows, D=size, BLOCK=block, **early(table.device), num_warps=warps)
    return out
