"""What attention's kernels do with tiles of rows and keys: take in keys, merge what splits have left, join what was shared."""

# pyright: reportCallIssue=false
# Triton types a launch without its options.

import torch
import triton
import triton.language as tl
from triton import knobs

from penstock.kernels.prepare_kv.cache_rows import SCALED

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_LOG2E = 1.4426950408889634


def product_types(dtype: torch.dtype, kept: torch.dtype) -> tuple[tl.dtype, tl.dtype]:
    """What keys and what values are multiplied in, for queries and a cache of these dtypes."""
    if knobs.runtime.interpret:  # which multiplies bfloat16 wrongly; nothing is compiled then
        return tl.float32, tl.float32
    if kept.itemsize > 1 or dtype is torch.float32:
        return _TYPES[dtype], _TYPES[dtype]
    # Weights are 1 at most, and float16 is the shorter way from eight bits; but times a row's scale they go below its range.
    return _TYPES[dtype], tl.bfloat16 if kept is SCALED else tl.float16


def score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """What scores are multiplied by, and what caps them, for `attend`: scores are kept in base 2."""
    return (2.0 * _LOG2E * scale / softcap if softcap else _LOG2E * scale), softcap * _LOG2E


@triton.jit
def request_of(query_start_loc, num_requests, at, BLOCK_Q: tl.constexpr):
    """The request that tile `at` of BLOCK_Q queries belongs to: request i begins at tile start_i / BLOCK_Q + i, which leaves room
    for a last tile that is not full. With BLOCK_Q 0, `at` is a token."""
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(query_start_loc + middle)
        if BLOCK_Q > 0:
            start = start // BLOCK_Q + middle
        if start <= at:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def row_scales(pointers, seen, MASKED: tl.constexpr):
    """The float32 that stands at each of some places in a cache of int8."""
    at = pointers.to(tl.pointer_type(tl.float32))
    return tl.load(at, seen, 0.0) if MASKED else tl.load(at)


@triton.jit
def widened(x, TYPE: tl.constexpr, STAY: tl.constexpr):
    """What a cache holds in the dtype that it is multiplied in. With STAY it is widened where it was read, before it goes to
    where it is multiplied: values of eight bits would be brought there byte by byte."""
    BITS: tl.constexpr = x.dtype.primitive_bitwidth
    if x.dtype.is_fp8() and tl.bfloat16 == TYPE:
        # The compiler's own way is an instruction for each number that half a warp runs at a time (F2F).
        x = x.to(tl.float16).to(tl.float32)
    x = x.to(TYPE)
    if STAY and BITS == 8 and tl.float32 != TYPE:
        # Nothing is moved across what may have effects.
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def attend(
    acc, total, maximum, query, kv, kv_stride, table, block_stride, position, start, stop, first_tile, end_tile, scale, cap,
    HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr, ROW: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Takes in the keys of some tiles; without MASKED each row must see all of them."""
    dims = tl.arange(0, HEAD_BLOCK)
    real = dims < HEAD
    LOAD_MASK: tl.constexpr = MASKED or HEAD < HEAD_BLOCK
    SCALED: tl.constexpr = kv.dtype.element_ty == tl.int8
    for tile in range(first_tile, end_tile):
        keys = tile * TILE + tl.arange(0, TILE)
        if MASKED:
            seen = (keys >= start) & (keys < stop)
            block = tl.load(table + keys // PAGE, seen, 0)
        else:
            seen = keys >= 0
            block = tl.load(table + keys // PAGE)
        there = seen[:, None] & real[None, :]
        row = block.to(tl.int64) * block_stride + (keys % PAGE) * ROW
        at = row[:, None] + dims[None, :]
        key = tl.load(kv + at, there, 0.0) if LOAD_MASK else tl.load(kv + at)
        # The precision is float32's, which takes three passes through the tensor cores; other types have but one.
        score = tl.dot(query, tl.trans(widened(key, query.dtype, False)), input_precision="tf32x3")
        if SCALED:
            score *= row_scales(kv + row + HEAD, seen, MASKED)[None, :]
        # cap · tanh(x) is written with an exponential; scale and cap come with its factors.
        score = cap * (1.0 - 2.0 / (tl.exp2(score * scale) + 1.0)) if SOFTCAP else score * scale
        if MASKED:
            back = position[:, None] - keys[None, :]
            visible = back >= 0
            if WINDOW > 0:
                visible = visible & (back < WINDOW)
            score = tl.where(visible, score, float("-inf"))
        highest = tl.maximum(maximum, tl.max(score, 1))
        # With masks a row may have seen no key yet.
        base = tl.where(highest == float("-inf"), 0.0, highest) if MASKED else highest
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(maximum - base)
        maximum = highest
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None]
        value = tl.load(kv + kv_stride + at, there, 0.0) if LOAD_MASK else tl.load(kv + kv_stride + at)
        if SCALED:
            weight *= row_scales(kv + kv_stride + row + HEAD, seen, MASKED)[None, :]
        acc = tl.dot(weight.to(VALUES), widened(value, VALUES, True), acc, input_precision="tf32x3")
    return acc, total, maximum


@triton.jit
def finished(value, lse, sinks, head, inside):
    """A row's result from the normalised sum of its values and the base-2 logarithm of its sum; with a sink as one more key."""
    if sinks is not None:
        sink = tl.load(sinks + head, inside, 0.0).to(tl.float32) * 1.4426950408889634
        value = value / (1.0 + tl.exp2(sink - lse))[:, None]
    return value


@triton.jit
def merged(
    values, lse, rows, inside, low, high, splits,
    HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The result of a tile's rows, and the base-2 logarithms of their sums, from what the splits from `low` to `high` have left
    at these rows of the workspace, CHUNK of them at a time. A split's place in the sums is its number."""
    part = rows * splits
    dims = tl.arange(0, HEAD_BLOCK)
    at = tl.arange(0, CHUNK)
    first = low // CHUNK
    last = tl.cdiv(high, CHUNK)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    for chunk in range(first, last):
        split = chunk * CHUNK + at
        there = ((split >= low) & (split < high))[:, None] & inside[None, :]
        found = tl.load(lse + split[:, None] + part[None, :], there, float("-inf"))
        highest = tl.maximum(highest, tl.max(found, 0))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_BLOCK], tl.float32)
    for chunk in range(first, last):
        split = chunk * CHUNK + at
        there = ((split >= low) & (split < high))[:, None] & inside[None, :]
        found = tl.load(lse + split[:, None] + part[None, :], there, float("-inf"))
        weight = tl.exp2(found - base[None, :])
        total += tl.sum(weight, 0)
        some = (found > float("-inf"))[:, :, None] & (dims < HEAD)[None, None, :]
        place = (split[:, None] + part[None, :])[:, :, None] * HEAD + dims[None, None, :]
        acc += tl.sum(tl.load(values + place, some, 0.0) * weight[:, :, None], 0)
    total = tl.where(inside, total, 1.0)
    return acc / total[:, None], base + tl.log2(total)


@triton.jit
def joined(value, lse, shared, prefix, prefix_lse, place, inside, HEAD: tl.constexpr, HEAD_BLOCK: tl.constexpr):
    """The result of rows over all of their keys, and the logarithms of their sums, from that over their own keys and that over a
    prefix that they share, which is at their places in `prefix`. Exact: both are weighted by their sums."""
    dims = tl.arange(0, HEAD_BLOCK)
    there = inside & (tl.load(shared) > 0)
    of_prefix = tl.load(prefix_lse + place, there, float("-inf"))
    part = tl.load(prefix + place[:, None] * HEAD + dims[None, :], there[:, None] & (dims < HEAD)[None, :], 0.0)
    highest = tl.maximum(lse, of_prefix)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    own = tl.exp2(lse - base)
    others = tl.exp2(of_prefix - base)
    total = own + others
    total = tl.where(total == 0.0, 1.0, total)
    return (value * own[:, None] + part * others[:, None]) / total[:, None], base + tl.log2(total)
