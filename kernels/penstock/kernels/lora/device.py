"""Low-rank adapters on a device: the twins of `LoraShelf` and `LoraBatch`, in memory whose addresses never change."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

MIN_WIDTH = 16
"""The least that tensor cores take; ranks are rounded up to powers of two."""
OUTPUT_TILE = 64
"""Outputs that a program computes, all of one projection."""


@dataclass
class DeviceLoraBatch:
    """Filled on the device, step by step."""

    token_slots: torch.Tensor
    """[at least n], int32: each token's slot, -1 for none; padding has none."""
    is_used: bool = True
    """Whether the kernels that add adapters are launched. The host knows before a step whether a request of it has one."""


class DeviceLoraShelves:
    """The low-rank factors of a layer's projections, side by side, so that one launch serves all of them.

    Args: as `batch.lora_shelves` has them; the factors are in the model's dtype, on its device.
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
        self.width = max(MIN_WIDTH, 1 << (max_rank - 1).bit_length())
        self.parts = list(parts)
        """Of each projection, its first output among the layer's, and how many there are."""
        self._starts = [sum(size for _, size in self.parts[:part]) for part in range(len(self.parts) + 1)]
        self.a = torch.zeros(slots, len(parts) * self.width, in_features, dtype=dtype, device=device)
        """[slots, parts · width, in]; what is beyond an adapter's rank is zero, as is an adapter that is not there."""
        self.b = torch.zeros(slots, self._starts[-1], self.width, dtype=dtype, device=device)
        """[slots, outputs of all parts, width], scaled."""
        self.tiles = torch.tensor(self._output_tiles(), dtype=torch.int32).to(device)
        """[t, 4], int32: a tile's first output in the layer and in `b`, how many it has, and its part."""

    def _output_tiles(self) -> list[tuple[int, int, int, int]]:
        return [
            (offset + at, self._starts[part] + at, min(OUTPUT_TILE, size - at), part)
            for part, (offset, size) in enumerate(self.parts)
            for at in range(0, size, OUTPUT_TILE)
        ]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, part: int) -> "DeviceLoraShelf":
        ranks = slice(part * self.width, (part + 1) * self.width)
        return DeviceLoraShelf(self.a[:, ranks], self.b[:, self._starts[part] : self._starts[part + 1]])

    def __iter__(self) -> Iterator["DeviceLoraShelf"]:
        return (self[part] for part in range(len(self)))


@dataclass(frozen=True)
class DeviceLoraShelf:
    """One projection's share, to be filled as `LoraShelf` is."""

    a: torch.Tensor
    """[slots, width, in]."""
    b: torch.Tensor
    """[slots, out, width]."""

    @property
    def nbytes(self) -> int:
        """Memory of all slots."""
        return self.a.nbytes + self.b.nbytes

    def put(self, slot: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Fills a slot with [rank, in] and [out, rank]. On the stream that runs the steps, this waits for those before it and is
        waited for by those after it; the host waits only where the factors are not in pinned memory and in this dtype."""
        rank = a.shape[0]
        self.a[slot, :rank].copy_(a, non_blocking=True)
        self.b[slot, :, :rank].copy_(b, non_blocking=True)
        self.a[slot, rank:].zero_()
        self.b[slot, :, rank:].zero_()

    def clear(self, slot: int) -> None:
        """Leaves nothing in a slot."""
        self.a[slot].zero_()
        self.b[slot].zero_()
