"""Causal attention over a paged cache, in torch, with the same bits whatever else is in the batch.

Each query and key/value head is one item of a batched product of fixed shape [queries a key head, d] × [d, tile]; an item's
tiles are taken in the order of the keys' positions and combined by online softmax (Milakov and Gimelshein, 2018) in float32. So
an item's result is a function of its own query and keys: neighbours, chunks, cached prefixes and the order of physical blocks
change how many items there are, never one of them.
"""

import torch

from penstock.kernels.paged_attention.batch import DecodeTile, PagedBatch, Prefill
from penstock.kernels.prepare_kv.cache_rows import from_rows


def paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    value_size: int = 0,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attends each query to the keys of its request up to its own position, from the first or as far back as the batch's window.

    Args:
        q: [n, heads, d].
        kv_cache: [blocks, 2, kv_heads, block_size, row], this step's keys and values included; rows as in
            `prepare_kv.cache_rows`. What lies outside the requests' tokens may be anything, NaN as well.
        batch: Which of the n tokens and which blocks are whose.
        scale: Of the scores, 1/√d as a rule.
        softcap: Where not 0, a score s becomes softcap · tanh(s / softcap), as in Gemma 2.
        sinks: [heads], float32: the score of one more key a head, whose value is zero (gpt-oss). None: there is none.
        value_size: Where not 0, so many last elements of a key are its value (latent attention), and the cache is
            [blocks, 1, kv_heads, block_size, row].
        scales: [2, kv_heads] float32: keys and values are what the cache holds times these. None: they are what it holds.

    Returns:
        [n, heads, d], or [n, heads, value_size], in q's dtype.
    """
    kv_heads, head_size = kv_cache.shape[2], q.shape[2]
    grouped = (q.float() * scale).view(q.shape[0], kv_heads, -1, head_size)
    if scales is not None:  # scores are linear in the keys, and results in the values
        grouped = grouped * scales[0, :, None, None]
    of_key_heads = None if sinks is None else sinks.view(kv_heads, -1)
    out = grouped.new_empty(*grouped.shape[:3], value_size or head_size)
    if batch.decode_tokens.numel():
        queries = grouped[batch.decode_tokens]
        out[batch.decode_tokens] = _decode(queries, kv_cache, batch.decode_tiles, softcap, of_key_heads, value_size)
    for prefill in batch.prefills:
        chunk = slice(prefill.start, prefill.start + prefill.length)
        out[chunk] = _prefill(grouped[chunk], kv_cache, prefill, softcap, of_key_heads, value_size)
    if scales is not None:
        out *= scales[0 if value_size else 1, :, None, None]
    return out.to(q.dtype).flatten(1, 2)


def _decode(
    q: torch.Tensor, kv_cache: torch.Tensor, tiles: list[DecodeTile], softcap: float, sinks: torch.Tensor | None, value_size: int
) -> torch.Tensor:
    """One query a request: each item has keys of its own. q, result: [n, kv_heads, group, d]; sinks: [kv_heads, group]."""
    kv_heads, group, head_size = q.shape[1:]
    state = _Softmax(q.reshape(-1, group, head_size), softcap, value_size)
    for tile in tiles:
        keys, values = _gather(kv_cache, tile.block_ids, tile.rows.stop - tile.rows.start, head_size, value_size)
        if tile.unseen is not None:
            values.masked_fill_(tile.unseen[:, None, :, None], 0.0)
        masked = None if tile.unseen is None else tile.unseen.repeat_interleave(kv_heads, 0)[:, None]
        items = slice(tile.rows.start * kv_heads, tile.rows.stop * kv_heads)
        state.add(items, keys.flatten(0, 1), values.flatten(0, 1), masked)
    return state.result(None if sinks is None else sinks.repeat(len(q), 1)).view(*q.shape[:3], -1)


def _prefill(
    q: torch.Tensor, kv_cache: torch.Tensor, prefill: Prefill, softcap: float, sinks: torch.Tensor | None, value_size: int
) -> torch.Tensor:
    """Several queries of one request share its keys. q, result: [n, kv_heads, group, d]; sinks: [kv_heads, group]."""
    heads = [_Softmax(q[:, head].contiguous(), softcap, value_size) for head in range(q.shape[1])]
    for tile in prefill.tiles:
        keys, values = _gather(kv_cache, tile.block_ids, 1, q.shape[3], value_size)
        if tile.foreign is not None:
            values.masked_fill_(tile.foreign[:, None], 0.0)
        masked = None if tile.unseen is None else tile.unseen[:, None]
        count = tile.queries.stop - tile.queries.start
        for head, state in enumerate(heads):
            k, v = (part[:, head].expand(count, -1, -1) for part in (keys, values))
            state.add(tile.queries, k, v, masked)
    results = [state.result(None if sinks is None else sinks[head]) for head, state in enumerate(heads)]
    return torch.stack(results, dim=1)


def _gather(
    kv_cache: torch.Tensor, block_ids: torch.Tensor, rows: int, head_size: int, value_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a tile, each [rows, kv_heads, keys, d] float32."""
    # torch gathers no numbers of eight bits, but bytes.
    stored = kv_cache if kv_cache.itemsize > 1 else kv_cache.view(torch.uint8)
    _, kinds, kv_heads, block_size, _ = kv_cache.shape
    blocks = from_rows(stored.index_select(0, block_ids).view(kv_cache.dtype), head_size)
    blocks = blocks.view(rows, -1, kinds, kv_heads, block_size, head_size)
    both = torch.empty(kinds, rows, kv_heads, blocks.shape[1], block_size, head_size)
    both.copy_(blocks.permute(2, 0, 3, 1, 4, 5))
    found = both.flatten(3, 4)
    return found[0], found[0, ..., -value_size:].contiguous() if value_size else found[1]


class _Softmax:
    """Online softmax of items [i, group, d]: running maximum, sum and weighted values."""

    def __init__(self, q: torch.Tensor, softcap: float, value_size: int) -> None:
        self.q = q
        self.softcap = softcap
        self.maximum = q.new_full(q.shape[:2], float("-inf"))
        self.total = q.new_zeros(q.shape[:2])
        self.values = q.new_zeros(*q.shape[:2], value_size or q.shape[2])

    def add(self, items: slice, keys: torch.Tensor, values: torch.Tensor, masked: torch.Tensor | None) -> None:
        """Takes in a tile: keys and values [i, keys, d], masked [i, 1, keys], but never all keys of an item's first tile."""
        scores = torch.bmm(self.q[items], keys.transpose(1, 2))
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if masked is not None:
            scores.masked_fill_(masked, float("-inf"))
        old = self.maximum[items]
        new = torch.maximum(old, scores.amax(-1))
        weights = torch.exp(scores - new[..., None])
        shrink = torch.exp(old - new)
        self.maximum[items] = new
        self.total[items] = self.total[items] * shrink + weights.sum(-1)
        self.values[items] = self.values[items] * shrink[..., None] + torch.bmm(weights, values)

    def result(self, sinks: torch.Tensor | None) -> torch.Tensor:
        """[i, group, d], with sinks [i, group], or the same for all items, [group]."""
        if sinks is None:
            return self.values / self.total[..., None]
        maximum = torch.maximum(self.maximum, sinks)
        shrink = torch.exp(self.maximum - maximum)
        return self.values * shrink[..., None] / (self.total * shrink + torch.exp(sinks - maximum))[..., None]
