"""Causal attention of long prompts over a paged cache on Hopper, in Gluon: one warp copies, two warpgroups multiply.

    warp 8        wait until a slot is free │ ask for K of tile i │ wait │ ask for V of tile i │ …
    warps 0 to 3  wait for K of i + 1 │ begin Q K │ wait for V of i │ begin P V │ softmax of i + 1 beside it │ …
    warps 4 to 7  the same for the other 64 rows

Keys and values lie in rings of slots in shared memory, each slot with two barriers: `ready` completes when all bytes of its tile
have arrived, `free` when both warpgroups have multiplied by it. Each completes once a round of its ring, so that a wait names the
parity of the round: a reader that of its own, the writer that of the round before, which the first round finds complete.

A tile is copied page by page by the tensor memory accelerator (TMA), in pieces of 64 elements a row: side by side they are the
layout of a matrix that `warpgroup_mma` reads. Nothing outside a request's keys is read: pages beyond its last are asked for at a
block that does not exist, which gives zeros. The last page is asked for so many rows earlier as it is not full, whose place zeros
take too; its keys then stand at the end of the page, and the mask knows it.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
# Gluon types a launch without its options, and loops and tuples of constants not at all.

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from penstock.kernels.paged_attention.device_batch import DeviceBatch
from penstock.kernels.paged_attention.launch import AttentionShape, Launch
from penstock.kernels.paged_attention.tiles import request_of

WIDTH = 64
"""Elements of a row in a piece: the 128 bytes that shared memory is swizzled by."""
_REGISTERS, _REGISTERS_OF_MANY = (240, 24), (232, 40)
"""A thread: of those that multiply, and of the warp that copies with its three idle neighbours; 64,512 of 65,536 together. The
second where a tile has more than four pages, whose numbers that warp holds."""
_LAUNCHED_REGISTERS = 168
"""A thread at the start, from which the two above are redistributed."""

_request_of = gluon.jit(request_of.fn)


@gluon.jit
def _ask(kv, ids, pieces, slot, side: gl.constexpr, kv_head, ready, first, last, shift, PARTS: gl.constexpr):
    """Asks for keys (side 0) or values (1) of the pages from `first` on, of which the last of the request is shifted."""
    PAGES: gl.constexpr = len(ids)
    WIDTH: gl.constexpr = kv.block_shape[4]
    for part in range(PARTS):
        for page in gl.static_range(PAGES):
            row = gl.where(first + page == last, -shift, 0)
            tma.async_copy_global_to_shared(
                kv, [ids[page], side, kv_head, row, part * WIDTH], ready, pieces.index((slot * PARTS + part) * PAGES + page)
            )


@gluon.jit
def _produce(
    kv, keys, values, key_ready, key_free, value_ready, value_free, table, no_block, kv_head, tiles, last, shift,
    HEAD: gl.constexpr, PAGE: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    PAGES: gl.constexpr = TILE // PAGE
    PARTS: gl.constexpr = HEAD // WIDTH
    BYTES: gl.constexpr = TILE * HEAD * 2
    key_pieces = keys._reinterpret(gl.bfloat16, [STAGES * PARTS * PAGES, 1, 1, 1, PAGE, WIDTH], kv.layout)
    value_pieces = values._reinterpret(gl.bfloat16, [STAGES * PARTS * PAGES, 1, 1, 1, PAGE, WIDTH], kv.layout)
    for tile in range(tiles):
        slot = tile % STAGES
        before = ((tile // STAGES) & 1) ^ 1
        first = tile * PAGES
        # All block numbers are on their way before a wait.
        ids = ()
        for page in gl.static_range(PAGES):
            ids = ids + (gl.load(table + first + page, first + page <= last, no_block),)  # noqa: RUF005 (what Gluon knows)
        mbarrier.wait(key_free.index(slot), before)
        mbarrier.expect(key_ready.index(slot), BYTES)
        _ask(kv, ids, key_pieces, slot, 0, kv_head, key_ready.index(slot), first, last, shift, PARTS)
        mbarrier.wait(value_free.index(slot), before)
        mbarrier.expect(value_ready.index(slot), BYTES)
        _ask(kv, ids, value_pieces, slot, 1, kv_head, value_ready.index(slot), first, last, shift, PARTS)


@gluon.jit
def _weigh(
    score, maximum, total, tile, full, position, last_begin, shift, seq_len, scale, TILE: gl.constexpr, columns: gl.constexpr
):
    """A tile's weights, and what becomes of the sums so far: their maximum, their total, and what they shrink by. Every row sees
    the first key, so that no maximum is infinite."""
    if tile >= full:
        column = tile * TILE + gl.arange(0, TILE, columns)
        key = gl.where(column >= last_begin, column - shift, column)
        real = (key < seq_len) & ((column < last_begin) | (key >= last_begin))
        visible = real[None, :] & (key[None, :] <= position[:, None])
        score = gl.where(visible, score, float("-inf"))
    highest = gl.maximum(maximum, gl.max(score, 1))
    weight = gl.exp2(score * scale - (highest * scale)[:, None])
    shrink = gl.exp2((maximum - highest) * scale)
    return weight, highest, total * shrink + gl.sum(weight, 1), shrink


@gluon.jit
def _places(token, left, kv_head, HALF: gl.constexpr, GROUP: gl.constexpr, BLOCK_Q: gl.constexpr, lines: gl.constexpr):
    """Of the rows of a half: their tokens, their heads, and whether they are any."""
    row = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, lines))
    local = row // GROUP
    return token + local.to(gl.int64), kv_head * GROUP + row % GROUP, (row < BLOCK_Q * GROUP) & (local < left)


@gluon.jit
def _consume(
    out, q, queries, keys, values, key_ready, key_free, value_ready, value_free, token, left, kv_head, heads, q_token, q_head,
    lowest, tiles, full, last_begin, shift, seq_len, scale, HALF: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr,
    BLOCK_Q: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    weights: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    of_rows: gl.constexpr = gl.SliceLayout(1, scores)
    columns: gl.constexpr = gl.SliceLayout(0, scores)
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD, HEAD // 8], [4, 1], [1, 0])

    place, head, there = _places(token, left, kv_head, HALF, GROUP, BLOCK_Q, lines)
    dims = gl.arange(0, HEAD, gl.SliceLayout(0, lines))[None, :]
    queries.store(gl.load(q + (place * q_token + head * q_head)[:, None] + dims, there[:, None] & (dims >= 0), 0.0))
    fence_async_shared()

    position = lowest + (HALF * 64 + gl.arange(0, 64, of_rows)) // GROUP
    maximum = gl.full([64], float("-inf"), gl.float32, of_rows)
    total = gl.full([64], 0.0, gl.float32, of_rows)
    nothing = gl.full([64, TILE], 0.0, gl.float32, scores)
    acc = gl.full([64, HEAD], 0.0, gl.float32, sums)

    mbarrier.wait(key_ready.index(0), 0)
    key = keys.index(0)
    score = warpgroup_mma(queries, key.permute((1, 0)), nothing, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, deps=[score])
    mbarrier.arrive(key_free.index(0), count=1)
    weight, maximum, total, shrink = _weigh(
        score, maximum, total, 0, full, position, last_begin, shift, seq_len, scale, TILE, columns
    )
    weight = gl.convert_layout(weight.to(gl.bfloat16), weights)
    for tile in range(1, tiles):
        slot = tile % STAGES
        before = (tile - 1) % STAGES
        mbarrier.wait(key_ready.index(slot), (tile // STAGES) & 1)
        key = keys.index(slot)
        begun = warpgroup_mma(queries, key.permute((1, 0)), nothing, use_acc=False, is_async=True)
        mbarrier.wait(value_ready.index(before), ((tile - 1) // STAGES) & 1)
        value = values.index(before)
        adding = warpgroup_mma(weight, value, acc, is_async=True)
        score = warpgroup_mma_wait(1, deps=[begun])
        mbarrier.arrive(key_free.index(slot), count=1)
        # The softmax of this tile runs beside the product with the values of the one before.
        new, maximum, total, shrink = _weigh(
            score, maximum, total, tile, full, position, last_begin, shift, seq_len, scale, TILE, columns
        )
        acc, weight = warpgroup_mma_wait(0, deps=[adding, weight])
        mbarrier.arrive(value_free.index(before), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, sums))[:, None]
        weight = gl.convert_layout(new.to(gl.bfloat16), weights)
    end = (tiles - 1) % STAGES
    mbarrier.wait(value_ready.index(end), ((tiles - 1) // STAGES) & 1)
    value = values.index(end)
    adding = warpgroup_mma(weight, value, acc, is_async=True)
    acc, weight = warpgroup_mma_wait(0, deps=[adding, weight])

    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, sums))[:, None]
    # Nobody reads the queries any more: through their place a result comes into whole lines. Where these go is found again, or
    # it would take registers for the whole loop.
    queries.store(acc.to(gl.bfloat16))
    token = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [token], dtype=gl.int32, is_pure=False, pack=1)
    place, head, there = _places(token, left, kv_head, HALF, GROUP, BLOCK_Q, lines)
    gl.store(out + ((place * heads + head) * HEAD)[:, None] + dims, queries.load(lines), there[:, None] & (dims >= 0))


@gluon.jit(do_not_specialize=["num_requests", "no_block"], do_not_specialize_on_alignment=["rows", "query_start_loc", "seq_lens"])
def _gluon_attention_kernel(
    out, q, kv, rows, query_start_loc, seq_lens, block_table, num_requests, no_block, scale, q_token, q_head, table_stride,
    GROUP: gl.constexpr, HEAD: gl.constexpr, PAGE: gl.constexpr, BLOCK_Q: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr, SKIP: gl.constexpr, WIDTH: gl.constexpr, WORKERS: gl.constexpr,
):  # fmt: skip
    kv_head = gl.program_id(1)
    heads = gl.num_programs(1) * GROUP
    # A prompt's last queries see most keys, and begin first.
    block = gl.num_programs(0) - 1 - gl.program_id(0)
    request = _request_of(query_start_loc, num_requests, block, BLOCK_Q)
    begin = gl.load(query_start_loc + request)
    first = (block - begin // BLOCK_Q - request) * BLOCK_Q
    query_len = gl.load(query_start_loc + request + 1) - begin
    seq_len = gl.load(seq_lens + request)
    if (query_len <= SKIP) | (first >= query_len):
        return

    lowest = seq_len - query_len + first
    tiles = gl.cdiv(gl.minimum(lowest + BLOCK_Q, seq_len), TILE)
    last = (seq_len - 1) // PAGE
    last_begin = last * PAGE
    shift = last_begin + PAGE - seq_len
    # Tiles that all rows see in full, and in which no page is shifted.
    full = gl.minimum(lowest + 1, last_begin) // TILE
    table = block_table + gl.load(rows + request).to(gl.int64) * table_stride
    token = begin + first

    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    upper = gl.allocate_shared_memory(gl.bfloat16, [64, HEAD], flat)
    lower = gl.allocate_shared_memory(gl.bfloat16, [64, HEAD], flat)
    keys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, HEAD], flat)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, HEAD], flat)
    key_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(key_ready.index(slot), count=1)
        mbarrier.init(key_free.index(slot), count=2)
        mbarrier.init(value_ready.index(slot), count=1)
        mbarrier.init(value_free.index(slot), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                out, q, upper, keys, values, key_ready, key_free, value_ready, value_free, token, query_len - first, kv_head,
                heads, q_token, q_head, lowest, tiles, full, last_begin, shift, seq_len, scale, 0, GROUP, HEAD, BLOCK_Q, TILE,
                STAGES,
            )),
            (_consume, (
                out, q, lower, keys, values, key_ready, key_free, value_ready, value_free, token, query_len - first, kv_head,
                heads, q_token, q_head, lowest, tiles, full, last_begin, shift, seq_len, scale, 1, GROUP, HEAD, BLOCK_Q, TILE,
                STAGES,
            )),
            (_produce, (
                kv, keys, values, key_ready, key_free, value_ready, value_free, table, no_block, kv_head, tiles, last, shift,
                HEAD, PAGE, TILE, STAGES, WIDTH,
            )),
        ],
        [4, 1],
        WORKERS,
    )  # fmt: skip


def attend_long(
    out: torch.Tensor,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: DeviceBatch,
    shape: AttentionShape,
    factor: float,
    launch: Launch,
) -> None:
    """Writes the results of the requests with more than `launch.skip` queries; see `paged_attention`.

    Args:
        out: [n, heads, d] bfloat16.
        q: [n, heads, d] bfloat16.
        kv_cache: [blocks, 2, kv_heads, block_size, d] bfloat16, with blocks of 16, 32, 64 or 128 tokens and d 64 or 128.
        batch: Without a window.
        shape: The heads.
        factor: What scores are multiplied by, in base 2.
        launch: As of `gluon_launches`.
    """
    pages = launch.tile // batch.block_size
    piece = [1, 1, 1, batch.block_size, WIDTH]
    kv = TensorDescriptor.from_tensor(kv_cache, piece, gl.NVMMASharedLayout(128, 16, len(piece)))
    _gluon_attention_kernel[launch.blocks(batch.num_requests, batch.num_tokens), shape.num_kv_heads](
        out, q, kv, batch.rows, batch.query_start_loc, batch.seq_lens, batch.block_table, batch.num_requests, kv_cache.shape[0],
        factor, q.stride(0), q.stride(1), batch.block_table.stride(0),
        GROUP=shape.group, HEAD=shape.head_size, PAGE=batch.block_size, BLOCK_Q=launch.block_q, TILE=launch.tile,
        STAGES=launch.num_stages, SKIP=launch.skip, WIDTH=WIDTH, WORKERS=_REGISTERS_OF_MANY if pages > 4 else _REGISTERS,
        num_warps=launch.num_warps, maxnreg=_LAUNCHED_REGISTERS,
    )  # fmt: skip
