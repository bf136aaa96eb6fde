"""Causal attention over a paged cache on a GPU: one kernel for decoding, for chunks of prompts, for both at once and for drafts.

A program takes a tile of rows, each a query and one of the heads that share a key head, so that keys are read once for all of
them, and meets the keys of its request tile by tile with an online softmax (Dao et al., 2022; Milakov and Gimelshein, 2018). The
tiles that every row sees in full go through a loop without masks; the causal diagonal and a window's edge have a loop with them.
With split keys (Flash-Decoding, 2023) each program leaves a normalised result and the logarithm of its sum, from which the merge
is exact: the last of a tile's programs to arrive takes in what all have left, in the order of their keys, so that which one it is
changes no bit. Scores are kept in base 2, the scale folded into the exponent.

Nothing outside a request's keys is read into a product: such keys are masked when they are loaded, and count as zeros.

Keys and values of eight bits become numbers of 16 bits in registers, exactly, and are multiplied so; beside float32, of 32 bits.
Sums are float32, as ever: nothing is added up in eight bits. The scales of a head are applied outside of the loop. Where each row
has a scale of its own, scores are multiplied by those of the keys, and weights by those of the values.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# Triton types a launch without its options, and its loops not at all.

from typing import Any

import torch
import triton
import triton.language as tl

from penstock.kernels.dependent_launch import early, wait
from penstock.kernels.paged_attention.device_batch import DeviceBatch
from penstock.kernels.paged_attention.latent_triton import latent_attention
from penstock.kernels.paged_attention.launch import (
    AttentionShape,
    AttentionWorkspace,
    LaunchTable,
    fast_launches,
    invariant_launches,
    merge_chunk,
    power_of_two,
)
from penstock.kernels.paged_attention.prefix import PrefixWorkspace
from penstock.kernels.paged_attention.prefix_triton import attend_prefix
from penstock.kernels.paged_attention.tiles import attend, finished, joined, merged, product_types, request_of, score_factors
from penstock.kernels.prepare_kv.cache_rows import SCALED

_VARYING = ["num_requests", "num_tokens", "splits"]
_SMALL = ["rows", "query_start_loc", "seq_lens", "block_table", "sinks", "scales", "shared"]


@triton.jit
def _merge(
    out, values, lse, sinks, shared, prefix, prefix_lse, slot, token, queries, kv_head, low, high, splits,
    GROUP: tl.constexpr, HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr, BLOCK_Q: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes a tile's result from what the splits from `low` to `high` have left."""
    heads = tl.num_programs(1) * GROUP
    row = tl.arange(0, ROWS)
    local = row // GROUP
    head = kv_head * GROUP + row % GROUP
    inside = (row < BLOCK_Q * GROUP) & (local < queries)
    part = (slot + local).to(tl.int64) * heads + head
    value, of_all = merged(values, lse, part, inside, low, high, splits, HEAD, HEAD_BLOCK, ROWS, CHUNK)
    place = (token + local).to(tl.int64) * heads + head
    if shared is not None:
        value, of_all = joined(value, of_all, shared, prefix, prefix_lse, place, inside, HEAD, HEAD_BLOCK)
    dims = tl.arange(0, HEAD_BLOCK)
    real = inside[:, None] & (dims < HEAD)[None, :]
    tl.store(out + place[:, None] * HEAD + dims[None, :], finished(value, of_all, sinks, head, inside), real)


def _name(specialization: Any) -> str:
    """What a profiler calls a variant."""
    of = specialization.constants
    return f"paged_attention_{'long' if of['SEARCH'] else 'short'}{'_split' if of['SPLIT'] else ''}"


@triton.jit(repr=_name, do_not_specialize=[*_VARYING, "least_tiles"], do_not_specialize_on_alignment=_SMALL)
def _paged_attention_kernel(
    out, values, lse, arrived, q, kv_cache, rows, query_start_loc, seq_lens, block_table, sinks, scales,
    shared, prefix, prefix_lse, num_requests, num_tokens, splits, least_tiles, scale, cap,
    q_token, q_head, block_stride, kv_stride, head_stride, table_stride,
    GROUP: tl.constexpr, HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr, ROW: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr, SPLIT_TOKENS: tl.constexpr, SEARCH: tl.constexpr, SKIP: tl.constexpr, PADS: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    heads = tl.num_programs(1) * GROUP
    row = tl.arange(0, BLOCK_M)
    local = row // GROUP
    head = kv_head * GROUP + row % GROUP
    dims = tl.arange(0, HEAD_BLOCK)
    real = (row < BLOCK_Q * GROUP)[:, None] & (dims < HEAD)[None, :]
    zeros = tl.zeros([BLOCK_M, HEAD_BLOCK], tl.float32)

    # Which queries of which request.
    request = tl.program_id(0)
    first = 0
    if SEARCH:
        # A prompt's last queries see most keys, and begin first.
        block = tl.num_programs(0) - 1 - tl.program_id(0)
        request = request_of(query_start_loc, num_requests + PADS, block, BLOCK_Q)
        first = (block - tl.load(query_start_loc + request) // BLOCK_Q - request) * BLOCK_Q
    begin = tl.load(query_start_loc + request)
    if PADS and request == num_requests:
        if first + split == 0:
            for token in range(begin, num_tokens, BLOCK_Q):
                at = ((token + local).to(tl.int64) * heads + head)[:, None] * HEAD + dims[None, :]
                tl.store(out + at, zeros, real & (token + local < num_tokens)[:, None])
        return
    query_len = tl.load(query_start_loc + request + 1) - begin
    if SEARCH:
        if (query_len <= SKIP) | (first >= query_len):
            return
    else:
        if (query_len > BLOCK_Q) | (query_len <= 0):
            return
    seq_len = tl.load(seq_lens + request)
    inside = (row < BLOCK_Q * GROUP) & (first + local < query_len)
    real = real & inside[:, None]
    token = (begin + first + local).to(tl.int64)
    out_at = (token * heads + head)[:, None] * HEAD + dims[None, :]
    if seq_len == 0:
        if split == 0:
            tl.store(out + out_at, zeros, real)
        return

    # Which of its keys.
    lowest = seq_len - query_len + first
    stop = tl.minimum(lowest + BLOCK_Q, seq_len)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(lowest - WINDOW + 1, 0)
    if shared is not None:
        start = tl.load(shared)  # what lies before it is another launch's
    first_tile = start // TILE
    end_tile = tl.cdiv(stop, TILE)
    slot = begin + first + local if SEARCH else request * BLOCK_Q + local
    part = (slot.to(tl.int64) * heads + head) * splits + split
    low = 0
    high = 1
    if SPLIT:
        # The splits from `low` to `high` have keys; the others end.
        if SPLIT_TOKENS > 0:
            low = first_tile // (SPLIT_TOKENS // TILE)
            high = tl.cdiv(end_tile, SPLIT_TOKENS // TILE)
            first_tile = tl.maximum(first_tile, split * (SPLIT_TOKENS // TILE))
            end_tile = tl.minimum(end_tile, (split + 1) * (SPLIT_TOKENS // TILE))
        else:
            share = tl.maximum(tl.cdiv(end_tile - first_tile, splits), least_tiles)
            high = tl.cdiv(end_tile - first_tile, share)
            first_tile = first_tile + split * share
            end_tile = tl.minimum(end_tile, first_tile + share)
        if first_tile >= end_tile:
            return

    query = tl.load(q + (token * q_token + head * q_head)[:, None] + dims[None, :], real, 0.0).to(KEYS)
    kv = kv_cache + kv_head.to(tl.int64) * head_stride
    if scales is not None:
        scale *= tl.load(scales + kv_head)
    table = block_table + tl.load(rows + request).to(tl.int64) * table_stride
    position = lowest + local
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = zeros
    # Tiles that all rows see in full lie between those on a window's edge and those on the diagonal.
    full_end = tl.maximum(tl.minimum((lowest + 1) // TILE, end_tile), first_tile)
    if WINDOW > 0:
        full_start = tl.cdiv(tl.maximum(stop - WINDOW, 0), TILE)
        full_start = tl.maximum(tl.minimum(full_start, full_end), first_tile)
        acc, total, maximum = attend(
            acc, total, maximum, query, kv, kv_stride, table, block_stride, position, start, stop, first_tile, full_start,
            scale, cap, HEAD, HEAD_BLOCK, ROW, PAGE, TILE, WINDOW, SOFTCAP, True, VALUES,
        )  # fmt: skip
    else:
        full_start = first_tile
    acc, total, maximum = attend(
        acc, total, maximum, query, kv, kv_stride, table, block_stride, position, start, stop, full_start, full_end,
        scale, cap, HEAD, HEAD_BLOCK, ROW, PAGE, TILE, WINDOW, SOFTCAP, False, VALUES,
    )  # fmt: skip
    acc, total, maximum = attend(
        acc, total, maximum, query, kv, kv_stride, table, block_stride, position, start, stop, full_end, end_tile,
        scale, cap, HEAD, HEAD_BLOCK, ROW, PAGE, TILE, WINDOW, SOFTCAP, True, VALUES,
    )  # fmt: skip

    # A row of the tile may see none of this program's keys, and one outside of it sees none at all.
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if scales is not None:
        acc *= tl.load(scales + tl.num_programs(1) + kv_head)
    maximum = tl.where(total == 0.0, float("-inf"), maximum + tl.log2(total))
    if high - low == 1:
        if shared is not None:
            acc, maximum = joined(acc, maximum, shared, prefix, prefix_lse, token * heads + head, inside, HEAD, HEAD_BLOCK)
        tl.store(out + out_at, finished(acc, maximum, sinks, head, inside), real)
    elif SPLIT:
        tl.store(values + part[:, None] * HEAD + dims[None, :], acc, real)
        tl.store(lse + part, maximum, inside)
        tl.debug_barrier()  # what all threads have stored comes before the one that counts
        counter = arrived + tl.program_id(0) * tl.num_programs(1) + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == high - low - 1:
            tl.store(counter, 0)
            slot_0 = begin + first if SEARCH else request * BLOCK_Q
            _merge(
                out, values, lse, sinks, shared, prefix, prefix_lse, slot_0, begin + first, query_len - first, kv_head,
                low, high, splits, GROUP, HEAD, HEAD_BLOCK, BLOCK_Q, ROWS, CHUNK,
            )  # fmt: skip


def paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: DeviceBatch,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    *,
    table: LaunchTable = fast_launches,
    workspace: AttentionWorkspace | None = None,
    prefix: PrefixWorkspace | None = None,
    out: torch.Tensor | None = None,
    value_size: int = 0,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the reference for arguments and result; in q a head's elements lie side by side, in the cache those of a block's head.

    Args:
        q: See the reference.
        kv_cache: See the reference.
        batch: See the reference.
        scale: See the reference.
        softcap: See the reference.
        sinks: See the reference.
        table: How to launch.
        workspace: For what the table asks, ValueError where it is too small; None: allocated for the call.
        prefix: For batches that share a prefix, ValueError where it is too small; None: allocated for the call.
        out: See the reference.
        value_size: See the reference.
        scales: See the reference.
    """
    if value_size:
        return latent_attention(q, kv_cache, batch, scale, value_size, out, scales, workspace, table is invariant_launches)
    num_heads, head_size = q.shape[1], q.shape[2]
    kv_heads, requests, tokens = kv_cache.shape[2], batch.num_requests, batch.num_tokens
    shape = AttentionShape(num_heads, kv_heads, head_size, q.element_size(), kv_cache.dtype is SCALED, batch.window is not None)
    max_keys = batch.block_table.shape[1] * batch.block_size
    launches = table(shape, requests, batch.max_query_len, max_keys, tokens)
    if workspace is None:
        workspace = AttentionWorkspace.of(shape, launches, requests, tokens, q.device)
    else:
        workspace.check(shape, launches, requests, tokens)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    factor, cap = score_factors(scale, softcap)
    found = None, None
    if batch.shared is not None:
        if prefix is None:
            prefix = PrefixWorkspace.sized(shape, requests, max_keys, q.device)
        attend_prefix(q, kv_cache, batch, shape, (factor, cap), scales, prefix)
        found = prefix.values, prefix.lse
    padded = shape.padded_head_size
    keys, values = product_types(q.dtype, kv_cache.dtype)
    for launch in launches:
        if launch.gluon:
            # Only where it is asked for: its library changes from one version of Triton to the next.
            from penstock.kernels.paged_attention.gluon import attend_long

            attend_long(out, q, kv_cache, batch, shape, factor, launch)
            continue
        rows = power_of_two(launch.block_q * shape.group)
        _paged_attention_kernel[launch.blocks(requests, tokens), kv_heads, launch.splits](
            out, workspace.values, workspace.lse, workspace.arrived, q, kv_cache, batch.rows, batch.query_start_loc,
            batch.seq_lens, batch.block_table, sinks, scales, batch.shared, *found, requests, tokens, launch.splits,
            launch.least_tiles, factor, cap, q.stride(0), q.stride(1), kv_cache.stride(0), kv_cache.stride(1),
            kv_cache.stride(2), batch.block_table.stride(0),
            GROUP=shape.group, HEAD=head_size, HEAD_BLOCK=padded, ROW=kv_cache.shape[4], PAGE=batch.block_size,
            BLOCK_M=launch.block_m, BLOCK_Q=launch.block_q, TILE=launch.tile, WINDOW=batch.window or 0, SOFTCAP=softcap != 0.0,
            SPLIT=launch.splits > 1, SPLIT_TOKENS=launch.split_tokens, SEARCH=launch.search, SKIP=launch.skip,
            PADS=launch.pads, ROWS=rows, CHUNK=merge_chunk(rows * padded, launch.num_warps), KEYS=keys, VALUES=values,
            **early(q.device), num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip
    return out
