"""What happens before attention, in one pass on a GPU: a program takes the heads of one token, queries or keys and values.

    token t:  q heads 0–15 | q heads 16–31 | k and v heads 0–7        (heads of 128 elements)

It reads them where the fused projection has left them, normalises and rotates them in registers, and writes queries side by
side, keys and values into their slot of the cache. A pair of elements that rotate together is two loads of the same thread.
"""

# pyright: reportCallIssue=false
# Triton types a launch without its options.

import torch
import triton
import triton.language as tl

from penstock.kernels.prepare_kv.reference import QKNorm, Rotary

_PAIRS = 256
"""Pairs of elements that a warp takes: 16 bytes a thread and half in half precision."""


@triton.jit
def _rotate(
    source, target, inside, cos, sin, weight, eps,
    D: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Heads from `source`, [heads, 1] pointers, to `target`: normalised, the first 2 HALF elements rotated."""
    at = tl.arange(0, HALF_BLOCK)[None, :]
    rest = tl.arange(0, REST_BLOCK)[None, :] + 2 * HALF
    here, there = inside & (at < HALF), inside & (rest < D)
    first = tl.load(source + at, here, 0.0).to(tl.float32)
    second = tl.load(source + HALF + at, here, 0.0).to(tl.float32)
    c, s = tl.load(cos + at, at < HALF, 0.0), tl.load(sin + at, at < HALF, 0.0)
    scale = 1.0
    if NORM:
        squares = tl.sum(first * first + second * second, axis=1, keep_dims=True)
        if 2 * HALF < D:
            beyond = tl.load(source + rest, there, 0.0).to(tl.float32)
            squares += tl.sum(beyond * beyond, axis=1, keep_dims=True)
        scale = tl.rsqrt(squares / D + eps)
        first *= scale * tl.load(weight + at, at < HALF, 0.0)
        second *= scale * tl.load(weight + HALF + at, at < HALF, 0.0)
    tl.store(target + at, first * c - second * s, here)
    tl.store(target + HALF + at, second * c + first * s, here)
    if 2 * HALF < D:
        beyond = tl.load(source + rest, there, 0.0).to(tl.float32)
        if NORM:
            beyond *= scale * tl.load(weight + rest, rest < D, 0.0)
        tl.store(target + rest, beyond, there)


@triton.jit
def _prepare_kv_kernel(
    q, k, v, out, cache, slots, cos, sin, q_weight, k_weight, eps,
    q_stride, k_stride, v_stride, page_stride, angle_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, D_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    Q_TILES: tl.constexpr = (HEADS + TILE - 1) // TILE
    cos += token * angle_stride
    sin += token * angle_stride
    if tile < Q_TILES:
        head = tile * TILE + tl.arange(0, TILE)[:, None]
        source, target = q + token * q_stride + head * D, out + token * HEADS * D + head * D
        _rotate(source, target, head < HEADS, cos, sin, q_weight, eps, D, HALF, HALF_BLOCK, REST_BLOCK, NORM)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            head = (tile - Q_TILES) * TILE + tl.arange(0, TILE)[:, None]
            target = cache + slot // BLOCK_SIZE * page_stride + slot % BLOCK_SIZE * D + head * (BLOCK_SIZE * D)
            source = k + token * k_stride + head * D
            _rotate(source, target, head < KV_HEADS, cos, sin, k_weight, eps, D, HALF, HALF_BLOCK, REST_BLOCK, NORM)
            if v is not None:
                at = tl.arange(0, D_BLOCK)[None, :]
                inside = (head < KV_HEADS) & (at < D)
                value = tl.load(v + token * v_stride + head * D + at, inside, 0.0)
                tl.store(target + KV_HEADS * BLOCK_SIZE * D + at, value.to(cache.dtype.element_ty), inside)


def prepare_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    rotary: Rotary,
    qk_norm: QKNorm | None,
) -> torch.Tensor:
    """See the reference; tokens may lie apart in q, k and v, blocks in the cache. A token without a slot is written nowhere."""
    tokens, heads, size = q.shape
    kv_heads, block_size, half = kv_cache.shape[2], kv_cache.shape[3], rotary.cos.shape[1]
    out = q.new_empty(q.shape)
    if not tokens:
        return out
    half_block = triton.next_power_of_2(half)
    # With 4 warps over halves of 128 the compiler would pass every tile through shared memory to match the angles' threads.
    warps = 4 if half_block <= 64 else 8
    tile = min(triton.next_power_of_2(max(heads, kv_heads)), max(1, warps * _PAIRS // half_block))
    weights = (rotary.cos, rotary.cos, 0.0) if qk_norm is None else (qk_norm.q_weight, qk_norm.k_weight, qk_norm.eps)
    strides = (q.stride(0), k.stride(0), 0 if v is None else v.stride(0), kv_cache.stride(0), rotary.cos.stride(0))
    grid = (tokens, triton.cdiv(heads, tile) + triton.cdiv(kv_heads, tile))
    _prepare_kv_kernel[grid](
        *(q, k, v, out, kv_cache, slot_mapping, rotary.cos, rotary.sin, *weights, *strides),
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=size,
        HALF=half,
        BLOCK_SIZE=block_size,
        TILE=tile,
        D_BLOCK=triton.next_power_of_2(size),
        HALF_BLOCK=half_block,
        NORM=qk_norm is not None,
        REST_BLOCK=triton.next_power_of_2(max(1, size - 2 * half)),
        num_warps=warps,
    )
    return out
