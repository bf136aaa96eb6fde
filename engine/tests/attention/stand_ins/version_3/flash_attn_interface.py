"""FlashAttention 3's paged entry, with its signature, in torch. What the library leaves undefined is NaN."""

import torch

from penstock.kernels.paged_attention.device_batch import DeviceBatch
from penstock.kernels.paged_attention.device_reference import paged_attention_device


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    assert causal and window_size[1] == (-1 if window_size[0] == -1 else 0)
    batch = DeviceBatch(
        block_size=k_cache.shape[1],
        rows=torch.arange(len(page_table), dtype=torch.int32),
        query_start_loc=cu_seqlens_q,
        seq_lens=cache_seqlens,
        block_table=page_table,
        window=None if window_size[0] == -1 else window_size[0] + 1,
        max_query_len=max_seqlen_q,
        num_tokens=len(q),
    )
    cache = torch.stack([k_cache, v_cache], 1).transpose(2, 3)
    out = paged_attention_device(q, cache, batch, softmax_scale, softcap)
    out[int(cu_seqlens_q[-1]) :] = float("nan")
    return out
