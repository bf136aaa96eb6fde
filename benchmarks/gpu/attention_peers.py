"""Attention of others, in the same run where it can be had. What cannot is named with its reason."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from gpu.clock import Clock
from gpu.figures import Row

Work = Callable[[], object]
Peers = dict[str, Callable[[], Work]]
"""By name, what makes the work ready; it raises whatever stands in the way."""


def beside(peers: Peers, clock: Clock, seconds: float, told: Callable[[float], Row], *, flush: bool = True) -> Row:
    """Of each peer its time as it is told, and how many times as long it takes as ours, which takes `seconds`; of one that is not
    there, or cannot, why. `flush`: as of the clock."""
    found: Row = {}
    for name, prepare in peers.items():
        try:
            theirs = clock.seconds(prepare(), flush=flush)
        except Exception as error:  # noqa: BLE001 (whatever stands in its way)
            found[name] = {"absent": f"{type(error).__name__}: {error}".partition("\n")[0]}
        else:
            found[name] = told(theirs) | {"penstock_over_it": theirs / seconds}
    return found


def prefill_peers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Peers:
    """Causal attention over one prompt.

    Args:
        q: [n, heads, d].
        k: [n, kv_heads, d].
        v: [n, kv_heads, d].
        scale: Of the scores.
    """
    batch_q, batch_k, batch_v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return {
        "torch SDPA, flash": lambda: _sdpa("FLASH_ATTENTION", batch_q, batch_k, batch_v, scale, causal=True),
        "torch SDPA, cuDNN": lambda: _sdpa("CUDNN_ATTENTION", batch_q, batch_k, batch_v, scale, causal=True),
        "FlexAttention": lambda: _flex(batch_q, batch_k, batch_v, scale),
        "FlashAttention 3": lambda: _flash3(q, k, v, scale),
        "FlashInfer": lambda: _flashinfer_prefill(q, k, v, scale),
    }


def decode_peers(q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, scale: float) -> Peers:
    """One query each of several requests over a paged cache.

    Args:
        q: [r, heads, d].
        cache: [blocks, 2, kv_heads, block_size, d].
        table: [r, max_blocks], int32.
        lengths: [r], int32.
        scale: Of the scores.
    """
    return {
        "torch SDPA, flash": lambda: _sdpa_decode(q, cache, table, lengths, scale),
        "FlashAttention 3": lambda: _flash3_decode(q, cache, table, lengths, scale),
        "FlashInfer": lambda: _flashinfer_decode(q, cache, table, lengths, scale),
    }


def latent_peers(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, scale: float, value_size: int
) -> Peers:
    """One query each of several requests over a paged cache of latents.

    Args:
        q: [r, heads, d].
        cache: [blocks, 1, 1, block_size, d]; a value is the last elements of its key.
        table: [r, max_blocks], int32.
        lengths: [r], int32.
        scale: Of the scores.
        value_size: Elements of a value.
    """
    return {"FlashMLA": lambda: _flash_mla(q, cache, table, lengths, scale, value_size)}


def _flash_mla(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, scale: float, value_size: int
) -> Work:
    """Whose keys begin with their values."""
    import flash_mla  # pyright: ignore[reportMissingImports]

    queries, keys = (x.roll(value_size, -1).contiguous() for x in (q.unsqueeze(1), cache[:, 0].transpose(1, 2)))
    plan = flash_mla.get_mla_metadata(lengths, q.shape[1], 1)
    return lambda: flash_mla.flash_mla_with_kvcache(
        queries, keys, table, lengths, value_size, *plan, softmax_scale=scale, causal=True
    )


def _sdpa(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> Work:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def work() -> object:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)

    work()
    return work


def _sdpa_decode(q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, scale: float) -> Work:
    """Over keys that lie side by side already, which spares it the table."""
    first = int(lengths[0])
    if not bool((lengths == first).all()):
        raise RuntimeError("takes lengths that are equal")
    size = cache.shape[3]
    pages = cache[table[:, : -(-first // size)].long()]  # [r, pages, 2, kv_heads, size, d]
    k, v = (pages[:, :, which].transpose(1, 2).flatten(2, 3)[:, :, :first].contiguous() for which in (0, 1))
    return _sdpa("FLASH_ATTENTION", q.unsqueeze(2), k, v, scale, causal=False)


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Work:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = q.shape[2]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=str(q.device))
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def work() -> object:
        return compiled(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)

    work()
    return work


def _flash3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Work:
    import flash_attn_interface  # pyright: ignore[reportMissingImports]

    batch = [x.unsqueeze(0) for x in (q, k, v)]
    return lambda: flash_attn_interface.flash_attn_func(*batch, softmax_scale=scale, causal=True)


def _flash3_decode(q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, scale: float) -> Work:
    import flash_attn_interface  # pyright: ignore[reportMissingImports]

    keys, values = (cache[:, which].transpose(1, 2) for which in (0, 1))  # [blocks, size, kv_heads, d]
    return lambda: flash_attn_interface.flash_attn_with_kvcache(
        q.unsqueeze(1), keys, values, cache_seqlens=lengths, page_table=table, softmax_scale=scale, causal=True
    )


def _flashinfer_prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Work:
    import flashinfer  # pyright: ignore[reportMissingImports]

    def work() -> object:
        return flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, sm_scale=scale)

    work()
    return work


def _flashinfer_decode(q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, scale: float) -> Work:
    import flashinfer  # pyright: ignore[reportMissingImports]

    size = cache.shape[3]
    counts = (lengths + size - 1) // size
    begins = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    pages = torch.cat([row[:count] for row, count in zip(table, counts.tolist(), strict=True)])
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(256 << 20, dtype=torch.uint8, device=q.device), "HND")
    last = (lengths - 1) % size + 1
    wrapper.plan(begins, pages, last.int(), q.shape[1], cache.shape[2], q.shape[2], size, sm_scale=scale, q_data_type=q.dtype)

    def work() -> object:
        return wrapper.run(q, cache)

    work()
    return work
