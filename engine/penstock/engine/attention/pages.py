"""The layers' views of the KV cache's pages."""

import torch

from penstock.engine.cache.layout import KVLayer


def plane_views(slots: torch.Tensor, layer: KVLayer, block_size: int) -> dict[str, torch.Tensor]:
    """A layer's planes, by name, each [blocks, …].

    Args:
        slots: The layer's slot of every page: [blocks, bytes], uint8.
        layer: What it keeps.
        block_size: Tokens in a block of it.
    """
    found: dict[str, torch.Tensor] = {}
    for plane, offset in zip(layer.planes, layer.offsets(block_size), strict=False):
        part = slots[:, offset : offset + plane.nbytes(block_size)].view(getattr(torch, plane.dtype))
        found[plane.name] = part.view(len(slots), *plane.of(block_size))
    return found
