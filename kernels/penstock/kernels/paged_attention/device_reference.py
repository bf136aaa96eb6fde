"""Paged attention over a `DeviceBatch` in plain torch: what a GPU kernel must give, and what runs a device step where none is.

Nothing here reads a tensor on the host, and no shape depends on a length: it is memory, not time, that it spends freely.
"""

import torch

from penstock.kernels.paged_attention.device_batch import DeviceBatch
from penstock.kernels.prepare_kv.cache_rows import from_rows


def paged_attention_device(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: DeviceBatch,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    value_size: int = 0,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends each query to the keys of its request up to its own position, from the first or as far back as the batch's window.

    Args:
        q: [n, heads, d], padding included.
        kv_cache: [blocks, 2, kv_heads, block_size, row], this step's keys and values included; rows as in
            `prepare_kv.cache_rows`. What lies outside the requests' tokens may be anything, NaN as well.
        batch: Which of the n tokens and which blocks are whose.
        scale: Of the scores, 1/√d as a rule.
        softcap: Where not 0, a score s becomes softcap · tanh(s / softcap), as in Gemma 2.
        sinks: [heads]: the score of one more key a head, whose value is zero (gpt-oss). None: there is none.
        out: As the result, contiguous: where it goes. None: into new memory.
        value_size: Where not 0, so many last elements of a key are its value (latent attention), and the cache is
            [blocks, 1, kv_heads, block_size, row].
        scales: [2, kv_heads] float32: keys and values are what the cache holds times these. None: they are what it holds.

    Returns:
        [n, heads, d], or [n, heads, value_size], in q's dtype; zeros for padding.
    """
    request, local, real = _places(batch)
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys, values, seen = _gather(kv_cache, batch, dtype, q.shape[2], value_size)
    if scales is not None:
        keys, values = keys * scales[0, :, None, None], values * scales[0 if value_size else 1, :, None, None]
    query_lens = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
    at = torch.arange(batch.max_query_len, device=q.device)
    tokens = (batch.query_start_loc[:-1, None] + at).clamp(max=max(batch.num_tokens - 1, 0))
    kv_heads = kv_cache.shape[2]
    grouped = q[tokens].to(dtype).unflatten(2, (kv_heads, -1))  # [r, queries, kv_heads, group, d]
    scores = torch.einsum("rqhgd,rhkd->rqhgk", grouped, keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = (batch.seq_lens - query_lens)[:, None] + at
    back = position[:, :, None] - torch.arange(keys.shape[2], device=q.device)
    visible = seen[:, None] & (back >= 0)
    if batch.window is not None:
        visible &= back < batch.window
    scores = scores.masked_fill(~visible[:, :, None, None], float("-inf"))
    weights = _softmax(scores, None if sinks is None else sinks.to(dtype).view(kv_heads, -1, 1))
    found = torch.einsum("rqhgk,rhkd->rqhgd", weights, values).flatten(2, 3)[request, local]
    found = found.masked_fill(~real[:, None, None], 0.0).to(q.dtype)
    return found if out is None else out.copy_(found)


def _places(batch: DeviceBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each token: its request, which of that request's queries it is, and whether it is one at all."""
    token = torch.arange(batch.num_tokens, device=batch.rows.device, dtype=torch.int32)
    request = torch.searchsorted(batch.query_start_loc[1:].contiguous(), token, right=True)
    inside = request < batch.num_requests
    request = request.clamp(max=batch.num_requests - 1)
    local = (token - batch.query_start_loc[request]).clamp(max=batch.max_query_len - 1)
    return request, local, inside & (batch.seq_lens[request] > 0)


def _gather(
    kv_cache: torch.Tensor, batch: DeviceBatch, dtype: torch.dtype, size: int, value_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each request's keys and values, [r, kv_heads, keys, d], zeros where nobody sees them; where somebody does: [r, keys]."""
    # torch gathers no numbers of eight bits, but bytes.
    stored = kv_cache if kv_cache.itemsize > 1 else kv_cache.view(torch.uint8)
    rows = stored[batch.block_table[batch.rows]].view(kv_cache.dtype)  # [r, max_blocks, 2, kv_heads, block_size, row]
    found = from_rows(rows, size).permute(2, 0, 3, 1, 4, 5).flatten(3, 4).to(dtype)
    keys, values = found[0], found[0, ..., -value_size:] if value_size else found[1]
    at = torch.arange(keys.shape[2], device=keys.device)
    seen = at < batch.seq_lens[:, None]
    if batch.window is not None:
        first = batch.seq_lens - (batch.query_start_loc[1:] - batch.query_start_loc[:-1])
        seen &= at > (first - batch.window)[:, None]
    unseen = ~seen[:, None, :, None]
    return keys.masked_fill(unseen, 0.0), values.masked_fill(unseen, 0.0), seen


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Weights over the last dimension, of [r, queries, kv_heads, group, keys]; rows without a key give anything."""
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1]
