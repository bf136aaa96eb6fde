"""Rows of a KV cache: one head's key or value of one token, in the cache's dtype.

Floating-point numbers of fewer bits (OCP's 8-bit formats) are rounded half to even, and what is beyond the greatest becomes it.
A row of int8 has a scale of its own, its largest magnitude divided by 127, which stands behind the numbers as a float32.
"""

import torch

FLOATS_OF_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes of rows that are divided by scales of the checkpoint."""
SCALED = torch.int8
"""The dtype of rows that have a scale."""
SCALE_BYTES = 4
"""Of a row's scale, behind its numbers."""
MOST = 127
"""The number that stands for the largest magnitude of a row."""
SMALLEST = torch.finfo(torch.float32).tiny
"""The least scale: of a row of zeros."""


def row_size(size: int, dtype: torch.dtype) -> int:
    """Elements of a row that holds `size` numbers."""
    return size + SCALE_BYTES if dtype is SCALED else size


def to_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[…, size] → […, row_size] in the cache's dtype; a number that is not finite makes a scaled row's scale NaN."""
    if dtype is SCALED:
        wide = x.float()
        scale = (wide.abs().amax(-1, keepdim=True) / MOST).clamp_(min=SMALLEST)
        scale += (wide * 0).sum(-1, keepdim=True)
        numbers = (wide / scale).round_().nan_to_num_().to(torch.int8)
        return torch.cat((numbers, scale.contiguous().view(torch.int8)), -1)
    if dtype.itemsize == 1:
        most = torch.finfo(dtype).max
        x = x.float().clamp(-most, most)
    return x.to(dtype)


def from_rows(rows: torch.Tensor, size: int) -> torch.Tensor:
    """[…, row_size] of the cache → […, size]: in float32 where rows have scales, else the rows themselves."""
    if rows.dtype is not SCALED:
        return rows
    return rows[..., :size].float() * rows[..., size:].contiguous().view(torch.float32)
