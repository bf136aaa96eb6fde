"""FlashAttention 2's paged entries, with their signatures, in torch. What the library leaves undefined is NaN."""

import torch

from penstock.kernels.paged_attention.device_batch import DeviceBatch
from penstock.kernels.paged_attention.device_reference import paged_attention_device


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    assert causal and q.dim() == 4
    starts = torch.arange(len(q) + 1, dtype=torch.int32) * q.shape[1]
    out = _attend(q.flatten(0, 1), k_cache, v_cache, starts, cache_seqlens, block_table, softmax_scale, window_size, softcap)
    return out.view(q.shape)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    assert causal and dropout_p == 0.0 and max_seqlen_k >= int(cu_seqlens_k.diff().max())
    out = _attend(q, k, v, cu_seqlens_q, cu_seqlens_k.diff().int(), block_table, softmax_scale, window_size, softcap)
    out[int(cu_seqlens_q[-1]) :] = float("nan")
    return out


def _attend(q, k, v, starts, seq_lens, table, scale, window_size, softcap):
    batch = DeviceBatch(
        block_size=k.shape[1],
        rows=torch.arange(len(table), dtype=torch.int32),
        query_start_loc=starts,
        seq_lens=seq_lens,
        block_table=table,
        window=None if window_size[0] == -1 else window_size[0] + 1,
        max_query_len=int(starts.diff().max()),
        num_tokens=len(q),
    )
    return paged_attention_device(q, torch.stack([k, v], 1).transpose(2, 3), batch, scale, softcap)
