"""Which tokens of a step go through which LoRA slot, and room for adapters in torch's own form."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

RANK_STEP = 8
"""Ranks are rounded up to a multiple of it: with the odd widths of small ranks, float32 GEMM takes paths of their own, with bits
that depend on the number of tokens."""


class LoraBatch:
    """One step's, kept for the next: whoever holds it, or the addresses of its arrays, sees the step that runs.

    Args:
        slots: Adapters at a time.
        max_tokens: Of a step.
    """

    is_used: Final = True
    """As of `DeviceLoraBatch`: a tape serves steps with adapters and without, so the operation is always called."""

    def __init__(self, slots: int, max_tokens: int) -> None:
        self.order = np.zeros(max_tokens, np.int64)
        """[max_tokens]: the tokens that have an adapter, by slot, and in their order within one."""
        self.starts = np.zeros(slots + 1, np.int64)
        """[slots + 1]: slot s has the tokens `order[starts[s] : starts[s + 1]]`."""
        self.layout = self.order.ctypes.data, self.starts.ctypes.data, slots
        """What the compiled operation is told: both arrays' addresses, and how many slots there are."""

    def fill(self, token_slots: np.ndarray[Any, np.dtype[np.integer[Any]]]) -> None:
        """Takes a step's tokens: [n], each one's slot, -1 for none; ValueError where there is no such slot."""
        counts = np.bincount(token_slots + 1, minlength=len(self.starts))
        np.cumsum(counts[1:], out=self.starts[1:])
        total = self.starts[-1]
        if total:
            self.order[:total] = np.argsort(token_slots, kind="stable")[counts[0] :]

    def clear(self) -> None:
        """Reset all tokens to no adapter."""
        self.starts[:] = 0

    def segments(self) -> list[tuple[int, torch.Tensor]]:
        """The slots in use, each with the indexes of its tokens, int64."""
        used = np.flatnonzero(np.diff(self.starts)).tolist()
        return [(slot, torch.from_numpy(self.order[self.starts[slot] : self.starts[slot + 1]])) for slot in used]


@dataclass(frozen=True)
class LoraShelf:
    """Room for the low-rank factors of one projection, a slot each, allocated once; float32."""

    offset: int
    """Of the projection's outputs among those of its layer."""
    a: torch.Tensor
    """[slots, max_rank, in]."""
    b: torch.Tensor
    """[slots, out, max_rank], scaled."""
    widths: list[int]
    """[slots]: how many of `max_rank` are in use, rounded up to `RANK_STEP`; 0: the adapter leaves the projection alone."""

    @staticmethod
    def empty(slots: int, max_rank: int, in_features: int, offset: int, out_features: int) -> "LoraShelf":
        """With zeros of the greatest width in all slots, so that a step that is measured takes the most. The memory is written:
        who measures what is in use counts it."""
        width = _rounded(max_rank)
        a, b = torch.zeros(slots, width, in_features), torch.zeros(slots, out_features, width)
        return LoraShelf(offset, a, b, [width] * slots)

    @property
    def nbytes(self) -> int:
        """Memory of all slots."""
        return self.a.nbytes + self.b.nbytes

    def put(self, slot: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Fills a slot with [rank, in] and [out, rank]; what is beyond the rank is zero."""
        rank = a.shape[0]
        self.a[slot, :rank], self.a[slot, rank:] = a, 0.0
        self.b[slot, :, :rank], self.b[slot, :, rank:] = b, 0.0
        self.widths[slot] = _rounded(rank)

    def clear(self, slot: int) -> None:
        """Leaves nothing in a slot."""
        self.a[slot], self.b[slot] = 0.0, 0.0
        self.widths[slot] = 0


def lora_shelves(
    slots: int, max_rank: int, in_features: int, parts: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> list[LoraShelf]:
    """A layer's.

    Args:
        slots: Adapters at a time.
        max_rank: Of an adapter.
        in_features: The layer's.
        parts: Of each projection, its first output among the layer's, and how many there are.
        dtype: The model's; shelves are float32 whatever it is.
        device: The CPU.
    """
    return [LoraShelf.empty(slots, max_rank, in_features, *part) for part in parts]


def _rounded(rank: int) -> int:
    return -(-rank // RANK_STEP) * RANK_STEP
