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

from penstock.kernels.dependent_launch import early, wait
from penstock.kernels.prepare_kv.cache_rows import MOST, SMALLEST, row_size
from penstock.kernels.prepare_kv.reference import QKNorm, Rotary

_PAIRS = 256
"""Pairs of elements that a warp takes: 16 bytes a thread and half in half precision."""
_MOST, _SMALLEST = tl.constexpr(MOST), tl.constexpr(SMALLEST)
_INFINITY = tl.constexpr(0x7F800000)
"""The bits of a float32's infinity: those of magnitudes that are not finite are none below, as whole numbers."""


@triton.jit
def _float8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, GREATEST: tl.constexpr):
    """float32 to bytes of a floating-point format: to nearest, ties to even. What is beyond the greatest number, whose bits as
    float32 are given, becomes it; NaN stays so. In whole numbers, since the interpreter's own cast rounds otherwise."""
    DROPPED: tl.constexpr = 23 - MANTISSA
    SHIFT: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23  # a float32 whose last bit is worth the least number
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, GREATEST)
    half = tl.full([], 0x3FFFFF, tl.int32) >> MANTISSA  # a bit less than half of what is dropped
    normal = ((magnitude + half + ((magnitude >> DROPPED) & 1)) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    shifted = magnitude.to(tl.float32, bitcast=True) + tl.full([], SHIFT, tl.int32).to(tl.float32, bitcast=True)
    small = shifted.to(tl.int32, bitcast=True) - SHIFT
    code = tl.where(magnitude < ((128 - BIAS) << 23), small, normal)
    return (tl.where(x == x, code, 0x7F) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def kept(x, divisor, TYPE: tl.constexpr):
    """float32 in the cache's dtype: the rounding of `cache_rows`, after a division where there is something to divide by."""
    if divisor is not None:
        x = tl.div_rn(x, divisor)
    if tl.float8e4nv == TYPE:
        x = _float8(x, 3, 7, 0x43E00000).to(TYPE, bitcast=True)  # 448
    elif tl.float8e5 == TYPE:
        x = _float8(x, 2, 15, 0x47600000).to(TYPE, bitcast=True)  # 57,344
    elif tl.int8 == TYPE:
        # To nearest, ties to even: the sum's last bit is worth 1.
        x = ((tl.where(x == x, x, 0.0) + 12582912.0) - 12582912.0).to(tl.int8)
    return x


@triton.jit
def magnitude(x):
    """The bits of |x|, which are in the order of the numbers: their greatest is that of a NaN, if there is one."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _place(
    source, target, inside, cos, sin, weight, divisor, eps, D: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Heads from `source`, [heads, 1] pointers, to `target`: normalised, with TURN the first 2 HALF elements rotated, and kept as
    `target` has them: divided by `divisor`, which may be None, or with a scale of each row behind it."""
    TYPE: tl.constexpr = target.dtype.element_ty
    at = tl.arange(0, HALF_BLOCK)[None, :]
    rest = tl.arange(0, REST_BLOCK)[None, :] + 2 * HALF
    here, there = inside & (at < HALF), inside & (rest < D)
    first = tl.load(source + at, here, 0.0).to(tl.float32)
    second = tl.load(source + HALF + at, here, 0.0).to(tl.float32)
    if 2 * HALF < D:
        beyond = tl.load(source + rest, there, 0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first + second * second, axis=1, keep_dims=True)
        if 2 * HALF < D:
            squares += tl.sum(beyond * beyond, axis=1, keep_dims=True)
        scale = tl.rsqrt(squares / D + eps)
        first *= scale * tl.load(weight + at, at < HALF, 0.0)
        second *= scale * tl.load(weight + HALF + at, at < HALF, 0.0)
        if 2 * HALF < D:
            beyond *= scale * tl.load(weight + rest, rest < D, 0.0)
    if TURN:
        c, s = tl.load(cos + at, at < HALF, 0.0), tl.load(sin + at, at < HALF, 0.0)
        first, second = first * c - second * s, second * c + first * s
    if tl.int8 == TYPE:
        most = tl.max(tl.maximum(magnitude(first), magnitude(second)), axis=1, keep_dims=True)
        if 2 * HALF < D:
            most = tl.maximum(most, tl.max(magnitude(beyond), axis=1, keep_dims=True))
        divisor = tl.maximum(tl.div_rn(most.to(tl.float32, bitcast=True), _MOST * 1.0), _SMALLEST)
        divisor = tl.where(most < _INFINITY, divisor, float("nan"))
        tl.store((target + D).to(tl.pointer_type(tl.float32)), divisor, inside)
    tl.store(target + at, kept(first, divisor, TYPE), here)
    tl.store(target + HALF + at, kept(second, divisor, TYPE), here)
    if 2 * HALF < D:
        tl.store(target + rest, kept(beyond, divisor, TYPE), there)


@triton.jit
def _prepare_kv_kernel(
    q, k, v, out, cache, slots, cos, sin, q_weight, k_weight, scales, eps,
    q_stride, k_stride, v_stride, page_stride, angle_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, NORM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    Q_TILES: tl.constexpr = (HEADS + TILE - 1) // TILE
    cos += token * angle_stride
    sin += token * angle_stride
    if tile < Q_TILES:
        head = tile * TILE + tl.arange(0, TILE)[:, None]
        source, target = q + token * q_stride + head * D, out + token * HEADS * D + head * D
        _place(source, target, head < HEADS, cos, sin, q_weight, None, eps, D, HALF, HALF_BLOCK, REST_BLOCK, NORM, True)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            head = (tile - Q_TILES) * TILE + tl.arange(0, TILE)[:, None]
            inside = head < KV_HEADS
            target = cache + slot // BLOCK_SIZE * page_stride + slot % BLOCK_SIZE * ROW + head * (BLOCK_SIZE * ROW)
            of_keys, of_values = None, None
            if scales is not None:
                of_keys = tl.load(scales + head, inside, 1.0)
                of_values = tl.load(scales + KV_HEADS + head, inside, 1.0)
            source = k + token * k_stride + head * D
            _place(source, target, inside, cos, sin, k_weight, of_keys, eps, D, HALF, HALF_BLOCK, REST_BLOCK, NORM, True)
            if v is not None:
                source, target = v + token * v_stride + head * D, target + KV_HEADS * BLOCK_SIZE * ROW
                _place(source, target, inside, cos, sin, k_weight, of_values, eps, D, HALF, HALF_BLOCK, REST_BLOCK, False, False)


def prepare_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    rotary: Rotary,
    qk_norm: QKNorm | None,
    scales: torch.Tensor | None = None,
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
    *weights, eps = (rotary.cos, rotary.cos, 0.0) if qk_norm is None else (qk_norm.q_weight, qk_norm.k_weight, qk_norm.eps)
    strides = (q.stride(0), k.stride(0), 0 if v is None else v.stride(0), kv_cache.stride(0), rotary.cos.stride(0))
    grid = (tokens, triton.cdiv(heads, tile) + triton.cdiv(kv_heads, tile))
    _prepare_kv_kernel[grid](
        *(q, k, v, out, kv_cache, slot_mapping, rotary.cos, rotary.sin, *weights, scales, eps, *strides),
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=size,
        ROW=row_size(size, kv_cache.dtype),
        HALF=half,
        BLOCK_SIZE=block_size,
        TILE=tile,
        HALF_BLOCK=half_block,
        NORM=qk_norm is not None,
        REST_BLOCK=triton.next_power_of_2(max(1, size - 2 * half)),
        **early(q.device),
        num_warps=warps,
    )
    return out
