"""Low-rank adapters in the order of the compiled operation on a CPU; the twin of `LoraShelf`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.kernels.linear.reference import LANES, WORD_BYTES, pack_weight


class PackedLoraShelves:
    """The low-rank factors of a layer's projections. A slot's are in one piece, in the order in which a step reads them: of each
    projection A, then B.

    Args: as `batch.lora_shelves` has them; the factors are in the model's dtype, float32 or bfloat16.
    """

    def __init__(
        self,
        slots: int,
        max_rank: int,
        in_features: int,
        parts: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        word = WORD_BYTES // dtype.itemsize
        sizes = [
            (_rounded(max_rank, LANES) * _rounded(in_features, word), _rounded(size, LANES) * _rounded(max_rank, word))
            for _, size in parts
        ]
        bounds = np.cumsum([0, *(size for pair in sizes for size in pair)]).tolist()
        self.factors = torch.zeros(slots, bounds[-1], dtype=dtype, device=device)
        """[slots, elements of a slot]; a projection's begin as at the greatest rank, and take what its own rank needs."""
        self.parts = np.array([(*part, *bounds[2 * at : 2 * at + 2]) for at, part in enumerate(parts)], np.int64)
        """[parts, 4]: first output among the layer's, how many there are, where A and B begin in a slot."""
        self.ranks: np.ndarray[Any, np.dtype[np.int64]] = np.full((slots, len(parts)), max_rank, np.int64)
        """0: the adapter leaves the projection alone. At first slots hold zeros of the greatest rank, so that a step that is
        measured takes the most."""
        addresses = self.factors.data_ptr(), self.parts.ctypes.data, self.ranks.ctypes.data
        self.layout = addresses[0], bounds[-1], addresses[1], len(parts), addresses[2], in_features
        """What the compiled operation is told: addresses and sizes."""
        pieces = self.factors.split([size for pair in sizes for size in pair], dim=1)
        self._shelves = [PackedLoraShelf(pieces[2 * at], pieces[2 * at + 1], self.ranks[:, at]) for at in range(len(parts))]

    def __len__(self) -> int:
        return len(self._shelves)

    def __iter__(self) -> "Iterator[PackedLoraShelf]":
        return iter(self._shelves)


@dataclass(frozen=True)
class PackedLoraShelf:
    """One projection's share, to be filled as `LoraShelf` is."""

    a: torch.Tensor
    """[slots, ⌈max_rank / 16⌉ · 16 · in, in whole words]: `pack_weight` of [rank, in]."""
    b: torch.Tensor
    """[slots, ⌈out / 16⌉ · 16 · max_rank, in whole words]: `pack_weight` of [out, rank], scaled."""
    ranks: np.ndarray[Any, np.dtype[np.int64]]
    """[slots]."""

    @property
    def nbytes(self) -> int:
        """Memory of all slots."""
        return self.a.nbytes + self.b.nbytes

    def put(self, slot: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Fills a slot with [rank, in] and [out, rank]."""
        for target, factor in ((self.a[slot], a), (self.b[slot], b)):
            packed = pack_weight(factor.to(target.dtype)).flatten()
            target[: packed.numel()] = packed
            target[packed.numel() :] = 0.0
        self.ranks[slot] = a.shape[0]

    def clear(self, slot: int) -> None:
        """Leaves nothing in a slot."""
        self.a[slot], self.b[slot] = 0.0, 0.0
        self.ranks[slot] = 0


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step
