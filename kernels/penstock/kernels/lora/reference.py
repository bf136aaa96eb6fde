"""Low-rank adapters on top of a linear layer (LoRA, Hu et al., 2021), several in a batch: y += x · Aᵀ · Bᵀ, by token."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from penstock.kernels.lora.batch import LoraBatch, LoraShelf

# Below four rows float32 GEMM takes other paths, with other bits, so that a lone token would differ from one in a batch.
MIN_ROWS = 4


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
        count = rows.shape[0]
        if count < MIN_ROWS:
            rows = F.pad(rows, (0, 0, 0, MIN_ROWS - count))
        for shelf in shelves:
            if width := shelf.widths[slot]:
                b = shelf.b[slot, :, :width]
                delta = F.linear(F.linear(rows, shelf.a[slot, :width]), b)[:count]
                out = y[:, shelf.offset : shelf.offset + b.shape[0]]
                out[tokens] = (out[tokens].float() + delta).to(y.dtype)
