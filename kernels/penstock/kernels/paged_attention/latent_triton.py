"""Latent attention over a paged cache on a GPU: all heads of a query meet the same keys, whose last elements are the values.

A program takes one query and 16 of its heads, or 64 where that leaves enough programs, and meets the keys up to its position
tile by tile with an online softmax. It holds the rotated part and the latent part of queries and keys apart, since together they
would be padded to twice their size. Keys are read again for each query of a prompt. In steps of few tokens a query's keys are
split among programs, of which the last to arrive merges, as in `triton`. Latents of eight bits are read as keys and values of
other models are.
"""

# pyright: reportCallIssue=false
# Triton types a launch without its options.

from typing import Any

import torch
import triton
import triton.language as tl

from penstock.kernels.dependent_launch import early, wait
from penstock.kernels.paged_attention.device_batch import DeviceBatch
from penstock.kernels.paged_attention.latent_launch import HEADS, TILE, latent_launch, latent_workspace
from penstock.kernels.paged_attention.launch import AttentionWorkspace, power_of_two
from penstock.kernels.paged_attention.tiles import merged, product_types, request_of, row_scales, widened

_WARPS = 8
_STAGES = 5
"""Of the loop over keys, so that tiles are on their way while one is worked on. With three or four it waits for what it asked."""
_LOG2E = 1.4426950408889634
_SMALL = ["rows", "query_start_loc", "seq_lens", "block_table", "scales"]


def _name(specialization: Any) -> str:
    """What a profiler calls a variant."""
    return f"latent_attention_{specialization.constants['BLOCK_H']}_heads"


@triton.jit(repr=_name, do_not_specialize=["num_requests", "splits", "least_tiles"], do_not_specialize_on_alignment=_SMALL)
def _latent_attention_kernel(
    out, values, lse, arrived, q, kv_cache, rows, query_start_loc, seq_lens, block_table, scales, num_requests, splits,
    least_tiles, scale, q_token, q_head, block_stride, table_stride,
    HEADS: tl.constexpr, ROTATED: tl.constexpr, RANK: tl.constexpr, ROTATED_BLOCK: tl.constexpr, RANK_BLOCK: tl.constexpr,
    ROW: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    MERGE_HEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    SCALED: tl.constexpr = kv_cache.dtype.element_ty == tl.int8
    token = tl.program_id(0)
    split = tl.program_id(2)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    turned, dims = tl.arange(0, ROTATED_BLOCK), tl.arange(0, RANK_BLOCK)
    is_head, is_turned, is_dim = head < HEADS, turned < ROTATED, dims < RANK
    target = out + (token.to(tl.int64) * HEADS + head)[:, None] * RANK + dims[None, :]
    real = is_head[:, None] & is_dim[None, :]
    acc = tl.zeros([BLOCK_H, RANK_BLOCK], tl.float32)
    if token >= tl.load(query_start_loc + num_requests):
        if split == 0:
            tl.store(target, acc, real)
        return
    request = request_of(query_start_loc, num_requests, token, 0)
    seq_len = tl.load(seq_lens + request)
    if seq_len == 0:
        if split == 0:
            tl.store(target, acc, real)
        return
    position = seq_len - tl.load(query_start_loc + request + 1) + token
    # So many splits have keys; the others end.
    end_tile = tl.cdiv(position + 1, TILE)
    share = tl.maximum(tl.cdiv(end_tile, splits), least_tiles)
    filled = tl.cdiv(end_tile, share)
    first_tile = split * share
    end_tile = tl.minimum(end_tile, first_tile + share)
    if first_tile >= end_tile:
        return
    source = q + (token.to(tl.int64) * q_token + head * q_head)[:, None]
    query = tl.load(source + ROTATED + dims[None, :], real, 0.0).to(KEYS)
    rotated = tl.load(source + turned[None, :], is_head[:, None] & is_turned[None, :], 0.0).to(KEYS)
    if scales is not None:
        scale *= tl.load(scales)
    table = block_table + tl.load(rows + request).to(tl.int64) * table_stride
    maximum = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    for tile in range(first_tile, end_tile):
        keys = tile * TILE + tl.arange(0, TILE)
        seen = keys <= position
        block = tl.load(table + keys // PAGE, seen, 0)
        row = block.to(tl.int64) * block_stride + (keys % PAGE) * ROW
        at = row[:, None]
        latent = tl.load(kv_cache + at + ROTATED + dims[None, :], seen[:, None] & is_dim[None, :], 0.0)
        key = tl.load(kv_cache + at + turned[None, :], seen[:, None] & is_turned[None, :], 0.0)
        score = tl.dot(query, tl.trans(widened(latent, KEYS, False)), input_precision="tf32x3")
        score = tl.dot(rotated, tl.trans(widened(key, KEYS, False)), score, input_precision="tf32x3") * scale
        if SCALED:
            of_rows = row_scales(kv_cache + row + ROTATED + RANK, seen, True)[None, :]
            score *= of_rows
        score = tl.where(seen[None, :], score, float("-inf"))
        highest = tl.maximum(maximum, tl.max(score, 1))
        weight = tl.exp2(score - highest[:, None])
        shrink = tl.exp2(maximum - highest)
        maximum = highest
        total = total * shrink + tl.sum(weight, 1)
        if SCALED:
            weight *= of_rows
        acc = tl.dot(weight.to(VALUES), widened(latent, VALUES, True), acc * shrink[:, None], input_precision="tf32x3")
    if scales is not None:
        acc *= tl.load(scales)
    acc = acc / total[:, None]
    if filled == 1:
        tl.store(target, acc, real)
    else:
        part = (token.to(tl.int64) * HEADS + head) * splits + split
        tl.store(values + part[:, None] * RANK + dims[None, :], acc, real)
        tl.store(lse + part, maximum + tl.log2(total), is_head)
        tl.debug_barrier()  # what all threads have stored comes before the one that counts
        counter = arrived + token * tl.num_programs(1) + tl.program_id(1)
        if tl.atomic_add(counter, 1, sem="acq_rel") == filled - 1:
            tl.store(counter, 0)
            # Of few heads, split by split: registers are those of the loop over keys, so that they are no reason to run alone.
            for first in range(0, BLOCK_H, MERGE_HEADS):
                some = tl.program_id(1) * BLOCK_H + first + tl.arange(0, MERGE_HEADS)
                place = token.to(tl.int64) * HEADS + some
                value, _ = merged(values, lse, place, some < HEADS, 0, filled, splits, RANK, RANK_BLOCK, MERGE_HEADS, 1)
                tl.store(out + place[:, None] * RANK + dims[None, :], value, (some < HEADS)[:, None] & is_dim[None, :])


def latent_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: DeviceBatch,
    scale: float,
    value_size: int,
    out: torch.Tensor | None,
    scales: torch.Tensor | None,
    workspace: AttentionWorkspace | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    """See `paged_attention_device`, where `value_size` is not 0; of windows, soft caps and sinks there is none.

    Args:
        q: See there.
        kv_cache: See there.
        batch: See there.
        scale: See there.
        value_size: See there.
        out: See there.
        scales: See there.
        workspace: For what splits leave, ValueError where it is too small; None: allocated for the call.
        invariant: See `latent_launch`.
    """
    tokens, heads, size = q.shape
    if out is None:
        out = torch.empty(tokens, heads, value_size, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    rotated = size - value_size
    keys, values = product_types(q.dtype, kv_cache.dtype)
    launch = latent_launch(heads, tokens, kv_cache.itemsize, batch.block_table.shape[1] * batch.block_size, invariant)
    if workspace is None:
        workspace = latent_workspace({tokens: launch}, heads, value_size, q.device)
    elif not workspace.holds(launch.parts(tokens) * heads, launch.counters(heads, tokens)):
        raise ValueError(f"the workspace is too small for {tokens} tokens")
    rank_block = power_of_two(max(value_size, 16))
    _latent_attention_kernel[tokens, triton.cdiv(heads, launch.block_h), launch.splits](
        *(out, workspace.values, workspace.lse, workspace.arrived, q, kv_cache),
        *(batch.rows, batch.query_start_loc, batch.seq_lens, batch.block_table, scales),
        *(batch.num_requests, launch.splits, launch.least_tiles, scale * _LOG2E),
        *(q.stride(0), q.stride(1), kv_cache.stride(0), batch.block_table.stride(0)),
        HEADS=heads,
        ROTATED=rotated,
        RANK=value_size,
        ROTATED_BLOCK=power_of_two(max(rotated, 16)),
        RANK_BLOCK=rank_block,
        ROW=kv_cache.shape[4],
        PAGE=batch.block_size,
        BLOCK_H=launch.block_h,
        TILE=TILE,
        KEYS=keys,
        VALUES=values,
        MERGE_HEADS=HEADS,
        **early(q.device),
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return out
