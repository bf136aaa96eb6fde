"""What happens before attention: queries and keys are normalised and rotated, keys and values written into the paged cache."""

from dataclasses import dataclass

import torch

from penstock.kernels.prepare_kv.cache_rows import to_rows
from penstock.kernels.rms_norm.reference import rms_norm
from penstock.kernels.rope.reference import rope

PAD_SLOT_ID = -1
"""The slot of a token that only fills up a step."""


@dataclass(frozen=True)
class QKNorm:
    """RMSNorm of each head's query and key, as Qwen3 has it."""

    q_weight: torch.Tensor
    """[d], float32."""
    k_weight: torch.Tensor
    """[d], float32."""
    eps: float


@dataclass(frozen=True)
class Rotary:
    """The step's rotary angles, for the first r elements of each head."""

    cos: torch.Tensor
    """[n, r/2], float32; a row's elements side by side."""
    sin: torch.Tensor
    """[n, r/2], float32; rows as far apart as the cosines'."""


def prepare_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    rotary: Rotary,
    qk_norm: QKNorm | None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the rotated queries; keys and values go to their slots of the cache.

    Args:
        q: [n, heads, d].
        k: [n, kv_heads, d].
        v: [n, kv_heads, d]. None: values are a part of the keys (latent attention).
        kv_cache: [blocks, 2, kv_heads, block_size, row]: keys at 0, values at 1 of the second dimension, which is 1 without
            values; rows as in `cache_rows`. Changed.
        slot_mapping: [n], int64 (on a device int32 too): block · block_size + offset in the block, of each token; no slot twice
            but PAD_SLOT_ID: such a token is written nowhere, or, in this form, to the first slot of block 0, the null block,
            whose content nobody reads.
        rotary: Of the n tokens.
        qk_norm: None where the model has none.
        scales: [2, kv_heads] float32, of a cache of floating-point numbers of eight bits: keys and values are divided by them
            before they are rounded to its dtype. None: they are stored as they are.

    Returns:
        [n, heads, d] in q's dtype.
    """
    if qk_norm is not None:
        q = rms_norm(q, qk_norm.q_weight, qk_norm.eps)
        k = rms_norm(k, qk_norm.k_weight, qk_norm.eps)
    block_size = kv_cache.shape[3]
    slots = slot_mapping.clamp(min=0)
    block = torch.div(slots, block_size, rounding_mode="floor")
    offset = slots - block * block_size
    # torch places no numbers of eight bits, but bytes.
    stored = kv_cache if kv_cache.itemsize > 1 else kv_cache.view(torch.uint8)
    k = rope(k, rotary.cos, rotary.sin)
    if scales is not None:
        k, v = k / scales[0, :, None], None if v is None else v / scales[1, :, None]
    stored[block, 0, :, offset] = to_rows(k, kv_cache.dtype).view(stored.dtype)
    if v is not None:
        stored[block, 1, :, offset] = to_rows(v, kv_cache.dtype).view(stored.dtype)
    return rope(q, rotary.cos, rotary.sin)
