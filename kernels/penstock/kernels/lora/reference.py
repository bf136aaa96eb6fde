"""Low-rank adapters on top of a linear layer (LoRA, Hu et al., 2021), several in a batch: y += x · Aᵀ · Bᵀ, by token."""

from collections.abc import Sequence

import torch

from penstock.kernels.linear.reference import linear_rows
from penstock.kernels.lora.batch import LoraBatch, LoraShelf


def add_lora(y: torch.Tensor, x: torch.Tensor, shelves: Sequence[LoraShelf], batch: LoraBatch) -> None:
    """Adds each token's adapter to what the base layer gave; tokens without one are not touched.

    Args:
        y: [n, out], changed in place; the sum is made in float32 and rounded once.
        x: [n, in].
        shelves: Of the layer's projections.
        batch: The step's tokens.
    """
    for slot, tokens in batch.segments():
        rows = x[tokens].float()
        for shelf in shelves:
            if width := shelf.widths[slot]:
                b = shelf.b[slot, :, :width]
                delta = linear_rows(linear_rows(rows, shelf.a[slot, :width]), b)
                out = y[:, shelf.offset : shelf.offset + b.shape[0]]
                out[tokens] = (out[tokens].float() + delta).to(y.dtype)
