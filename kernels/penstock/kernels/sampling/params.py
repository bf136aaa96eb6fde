"""Sampling parameters of request rows as a device holds them: one row of words each, so that an admission is one small copy.

A row is eight int32 words, read through views of other dtypes: 0-1 the seed, 2-3 top_p, 4 the temperature, 5 the logarithm of
min_p, 6 top_k, 7 nothing.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

WORDS = 8

_ROW = np.dtype([
    ("seed", np.int64),
    ("top_p", np.float64),
    ("temperature", np.float32),
    ("log_min_p", np.float32),
    ("top_k", np.int32),
    ("unused", np.int32),
])  # fmt: skip


class RowParams(NamedTuple):
    """Columns of a table of parameters, each [rows]."""

    seed: torch.Tensor
    """int64: key of the counter RNG."""
    top_p: torch.Tensor
    """float64; 1: all."""
    temperature: torch.Tensor
    """float32; 0: greedy."""
    log_min_p: torch.Tensor
    """float32; -inf: all."""
    top_k: torch.Tensor
    """int32; 0: all."""


def columns(words: torch.Tensor) -> RowParams:
    """Views of a table [rows, WORDS], int32 and contiguous."""
    doubles, floats = words.view(torch.float64), words.view(torch.float32)
    return RowParams(words.view(torch.int64)[:, 0], doubles[:, 1], floats[:, 4], floats[:, 5], words[:, 6])


def pack(seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> npt.NDArray[np.int32]:
    """A row's words, [WORDS].

    Args:
        seed: Whose low 64 bits count.
        temperature: 0: greedy.
        top_k: Below 1: all.
        top_p: In (0, 1].
        min_p: 0: all.
    """
    row = np.zeros((), _ROW)
    row["seed"] = np.uint64(seed & 0xFFFFFFFFFFFFFFFF).astype(np.int64)
    row["top_p"], row["temperature"], row["top_k"] = top_p, temperature, max(top_k, 0)
    # In float32 as `apply_min_p` has it.
    row["log_min_p"] = torch.tensor(min_p, dtype=torch.float32).log().item()
    return np.frombuffer(row.tobytes(), np.int32)


GREEDY = pack(seed=0, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
"""The words of a row that nobody has: padding's."""
