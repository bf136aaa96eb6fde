"""Attention of a step of decodes over a prefix that all requests share: one launch before that over each request's own keys.

A program takes a tile of rows, each a request's query and one of the heads that share a key head, and a share of the prefix's
keys, which all rows see in full: there are no masks. It leaves normalised results and the logarithms of their sums, with which
those of the other launch are joined (Hydragen, Juravsky et al., 2024).
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# Triton types a launch without its options, and its loops not at all.

import torch
import triton
import triton.language as tl

from penstock.kernels.dependent_launch import early, wait
from penstock.kernels.paged_attention.device_batch import DeviceBatch
from penstock.kernels.paged_attention.launch import AttentionShape, merge_chunk, power_of_two
from penstock.kernels.paged_attention.prefix import PrefixWorkspace, prefix_launch
from penstock.kernels.paged_attention.tiles import attend, merged, product_types

_SMALL = ["rows", "shared", "block_table", "scales"]


@triton.jit
def _merge(
    prefix, prefix_lse, parts, parts_lse, first, requests, kv_head, high, splits,
    GROUP: tl.constexpr, HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr, BLOCK_Q: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes a tile's result from what all splits have left."""
    row = tl.arange(0, ROWS)
    local = row // GROUP
    inside = (row < BLOCK_Q * GROUP) & (first + local < requests)
    place = (first + local).to(tl.int64) * (tl.num_programs(1) * GROUP) + kv_head * GROUP + row % GROUP
    value, of_all = merged(parts, parts_lse, place, inside, 0, high, splits, HEAD, HEAD_BLOCK, ROWS, CHUNK)
    dims = tl.arange(0, HEAD_BLOCK)
    tl.store(prefix + place[:, None] * HEAD + dims[None, :], value, inside[:, None] & (dims < HEAD)[None, :])
    tl.store(prefix_lse + place, of_all, inside)


@triton.jit(do_not_specialize=["requests", "splits", "least_tiles"], do_not_specialize_on_alignment=_SMALL)
def _prefix_attention_kernel(
    prefix, prefix_lse, parts, parts_lse, arrived, q, kv_cache, rows, shared, block_table, scales,
    requests, splits, least_tiles, scale, cap, q_token, q_head, block_stride, kv_stride, head_stride, table_stride,
    GROUP: tl.constexpr, HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr, ROW: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, TILE: tl.constexpr, SOFTCAP: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, key heads, splits); nothing is left of a prefix of 0 tokens."""
    wait(EARLY)
    kv_head = tl.program_id(1)
    length = tl.load(shared)
    tiles = length // TILE
    share = tl.maximum(tl.cdiv(tiles, splits), least_tiles)
    first_tile = tl.program_id(2) * share
    end_tile = tl.minimum(tiles, first_tile + share)
    if first_tile >= end_tile:
        return
    first = tl.program_id(0) * BLOCK_Q
    row = tl.arange(0, BLOCK_M)
    local = row // GROUP
    head = kv_head * GROUP + row % GROUP
    dims = tl.arange(0, HEAD_BLOCK)
    inside = (row < BLOCK_Q * GROUP) & (first + local < requests)
    real = inside[:, None] & (dims < HEAD)[None, :]
    token = (first + local).to(tl.int64)
    query = tl.load(q + (token * q_token + head * q_head)[:, None] + dims[None, :], real, 0.0).to(KEYS)
    kv = kv_cache + kv_head.to(tl.int64) * head_stride
    if scales is not None:
        scale *= tl.load(scales + kv_head)
    table = block_table + tl.load(rows).to(tl.int64) * table_stride
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_BLOCK], tl.float32)
    acc, total, maximum = attend(
        acc, total, maximum, query, kv, kv_stride, table, block_stride, local, 0, length, first_tile, end_tile, scale, cap,
        HEAD, HEAD_BLOCK, ROW, PAGE, TILE, 0, SOFTCAP, False, VALUES,
    )  # fmt: skip
    acc = acc / total[:, None]
    if scales is not None:
        acc *= tl.load(scales + tl.num_programs(1) + kv_head)
    maximum += tl.log2(total)
    place = token * (tl.num_programs(1) * GROUP) + head
    high = tl.cdiv(tiles, share)
    if high == 1:
        tl.store(prefix + place[:, None] * HEAD + dims[None, :], acc, real)
        tl.store(prefix_lse + place, maximum, inside)
    elif SPLIT:
        part = place * splits + tl.program_id(2)
        tl.store(parts + part[:, None] * HEAD + dims[None, :], acc, real)
        tl.store(parts_lse + part, maximum, inside)
        tl.debug_barrier()  # what all threads have stored comes before the one that counts
        counter = arrived + tl.program_id(0) * tl.num_programs(1) + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == high - 1:
            tl.store(counter, 0)
            _merge(
                prefix, prefix_lse, parts, parts_lse, first, requests, kv_head, high, splits,
                GROUP, HEAD, HEAD_BLOCK, BLOCK_Q, ROWS, CHUNK,
            )  # fmt: skip


def attend_prefix(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: DeviceBatch,
    shape: AttentionShape,
    factors: tuple[float, float],
    scales: torch.Tensor | None,
    workspace: PrefixWorkspace,
) -> None:
    """Leaves in the workspace what each request's query finds in the shared prefix.

    Args:
        q: As of `paged_attention`, of one query a request.
        kv_cache: As of `paged_attention`.
        batch: Without a window, and with `shared`.
        shape: The heads.
        factors: Of scores, from `score_factors`.
        scales: As of `paged_attention`.
        workspace: Large enough.

    Raises:
        ValueError: The batch has a window or requests of several queries, or the workspace is too small.
    """
    if batch.window is not None or batch.max_query_len != 1:
        raise ValueError("a shared prefix is read apart by requests of one query, and without a window")
    requests, padded = batch.num_requests, shape.padded_head_size
    max_keys = batch.block_table.shape[1] * batch.block_size
    workspace.check(shape, requests, max_keys)
    launch = prefix_launch(shape, requests, max_keys)
    keys, values = product_types(q.dtype, kv_cache.dtype)
    rows = power_of_two(launch.block_q * shape.group)
    _prefix_attention_kernel[triton.cdiv(requests, launch.block_q), shape.num_kv_heads, launch.splits](
        workspace.values, workspace.lse, workspace.parts, workspace.parts_lse, workspace.arrived, q, kv_cache, batch.rows,
        batch.shared, batch.block_table, scales, requests, launch.splits, launch.least_tiles, *factors,
        q.stride(0), q.stride(1), kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2), batch.block_table.stride(0),
        GROUP=shape.group, HEAD=shape.head_size, HEAD_BLOCK=padded, ROW=kv_cache.shape[4], PAGE=batch.block_size,
        BLOCK_M=launch.block_m, BLOCK_Q=launch.block_q, TILE=launch.tile, SOFTCAP=factors[1] != 0.0, SPLIT=launch.splits > 1,
        ROWS=rows, CHUNK=merge_chunk(rows * padded, launch.num_warps), KEYS=keys, VALUES=values, **early(q.device),
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
