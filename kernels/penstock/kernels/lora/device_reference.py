"""Low-rank adapters on a device, in torch, without a look at any value by the host."""

import torch

from penstock.kernels.lora.device import DeviceLoraBatch, DeviceLoraShelves


def add_lora(y: torch.Tensor, x: torch.Tensor, shelves: DeviceLoraShelves, batch: DeviceLoraBatch) -> None:
    """Adds each token's adapter to what the base layer gave; tokens without one are not touched.

    Args:
        y: [n, out], changed in place; the sum is made in float32 and rounded once.
        x: [n, in].
        shelves: Of the layer's projections.
        batch: Each token's slot.
    """
    slots, wide = batch.token_slots[: x.shape[0]], x.float()
    for slot in range(shelves.a.shape[0]):
        mine = (slots == slot)[:, None]
        for (offset, size), shelf in zip(shelves.parts, shelves, strict=True):
            delta = wide @ shelf.a[slot].float().T @ shelf.b[slot].float().T
            out = y[:, offset : offset + size]
            out.copy_(torch.where(mine, out.float() + delta, out.float()))
