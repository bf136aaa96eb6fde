"""Rows of which filters leave more than the tiles' candidates: a program reads such a row again for each step of its search."""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# Triton's language is Python with other types.

import triton
import triton.language as tl

from penstock.kernels.dependent_launch import wait
from penstock.kernels.sampling.device import (
    filters_of,
    finite_or_nothing,
    kept,
    key_of,
    middle,
    of_key,
    temperature_of,
    uniform_of,
)


@triton.jit
def wide_kernel(
    logits, row_stride, rows, positions, table, result, threshold, last_id, tile_max, wide,
    VOCAB: tl.constexpr, TILES: tl.constexpr, TILES_PAD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (m); nothing to do, and nothing read, for most rows."""
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    if tl.load(wide + row) == 1:
        request = tl.load(rows + row).to(tl.int64)
        temperature = temperature_of(table, request)
        log_min_p, top_k, top_p = filters_of(table, request)
        random = uniform_of(table, request, tl.load(positions + row))
        tile = tl.arange(0, TILES_PAD)
        base = tl.div_rn(tl.max(tl.load(tile_max + row * TILES + tile, tile < TILES, float("-inf")), 0), temperature)
        x = logits + row * row_stride
        # The least float that is a logit: -inf never is.
        limit, last = tl.maximum(base + log_min_p, -3.4028234663852886e38), tl.full([], VOCAB, tl.int32)
        if (top_k > 0) & (top_k < VOCAB):
            goal = top_k.to(tl.float64)
            number, low, _ = _measure(x, temperature, base, limit, last, limit, VOCAB, BLOCK, False)
            if number > goal:
                found = _highest_reaching(x, temperature, base, limit, last, goal, low, VOCAB, BLOCK, False)
                more, _, _ = _measure(x, temperature, base, limit, last, of_key(key_of(found) + 1), VOCAB, BLOCK, False)
                last = _locate(x, temperature, base, found, VOCAB, goal - more - 0.5, VOCAB, BLOCK, True)
                limit = found
        total, low, _ = _measure(x, temperature, base, limit, last, limit, VOCAB, BLOCK, True)
        goal = top_p * total
        if top_p < 1:
            found = _highest_reaching(x, temperature, base, limit, last, goal, low, VOCAB, BLOCK, True)
            more, _, _ = _measure(x, temperature, base, limit, last, of_key(key_of(found) + 1), VOCAB, BLOCK, True)
            short = tl.maximum(tl.ceil((goal - more) / tl.exp(found - base).to(tl.float64)), 1.0)
            until = _locate(x, temperature, base, found, VOCAB, short - 0.5, VOCAB, BLOCK, True)
            last = tl.where(found == limit, tl.minimum(until, last), until)
            limit = found
            total, low, _ = _measure(x, temperature, base, limit, last, limit, VOCAB, BLOCK, True)
        tl.store(result + row * 4, _locate(x, temperature, base, limit, last, random * total, VOCAB, BLOCK, False))
        tl.store(threshold + row, low)
        tl.store(last_id + row, _locate(x, temperature, base, low, last, VOCAB * 1.0, VOCAB, BLOCK, True))


@triton.jit
def _read(x, start, temperature, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    ids = start + tl.arange(0, BLOCK)
    value = finite_or_nothing(tl.load(x + ids, ids < VOCAB, float("-inf")).to(tl.float32))
    return ids, tl.div_rn(value, temperature)


@triton.jit
def _measure(x, temperature, base, limit, last, pivot, VOCAB: tl.constexpr, BLOCK: tl.constexpr, MASS: tl.constexpr):
    """Of what the limit leaves: the mass (or number) of those from `pivot` on, the least of them, and the greatest below."""
    sums = tl.zeros([BLOCK], tl.float64)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    below = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
        ids, value = _read(x, start, temperature, VOCAB, BLOCK)
        left = kept(value, ids, limit, last)
        counted = left & (value >= pivot)
        if MASS:
            sums += tl.where(counted, tl.exp(value - base), 0.0).to(tl.float64)
        else:
            sums += counted.to(tl.float64)
        least = tl.minimum(least, tl.where(counted, value, float("inf")))
        below = tl.maximum(below, tl.where(left & (value < pivot), value, float("-inf")))
    return tl.sum(sums, 0), tl.min(least, 0), tl.max(below, 0)


@triton.jit
def _highest_reaching(x, temperature, base, limit, last, goal, low, VOCAB: tl.constexpr, BLOCK: tl.constexpr, MASS: tl.constexpr):
    """The greatest value for which those at least as great reach the goal. Bounds are values that are there, so that the number
    of looks follows the number of different values."""
    least, most = key_of(low), key_of(base) + 1
    while least + 1 < most:
        key = middle(least, most)
        reached, above, below = _measure(x, temperature, base, limit, last, of_key(key), VOCAB, BLOCK, MASS)
        found = key_of(above)
        most = tl.where(reached < goal, key_of(below) + 1, tl.where(reached == goal, found + 1, most))
        least = tl.where(reached < goal, least, found)
    return of_key(least)


@triton.jit
def _locate(x, temperature, base, limit, last, goal, VOCAB: tl.constexpr, BLOCK: tl.constexpr, EQUAL: tl.constexpr):
    """The first id up to which the mass of what the limit leaves (or the number of those at it) is above `goal`; the last of them
    where none is."""
    done = tl.zeros([], tl.float64)
    before = tl.zeros([], tl.float64)
    at, final = tl.full([], -1, tl.int32), tl.zeros([], tl.int32)
    for start in tl.range(0, VOCAB, BLOCK, num_stages=3):
        ids, value = _read(x, start, temperature, VOCAB, BLOCK)
        weight = _weight(value, ids, base, limit, last, EQUAL)
        total = tl.sum(weight, 0)
        here = (at < 0) & (done + total > goal)
        at = tl.where(here, start, at)
        before = tl.where(here, done, before)
        done += total
        final = tl.maximum(final, tl.max(tl.where(weight > 0, ids, 0), 0))
    if at >= 0:
        ids, value = _read(x, at, temperature, VOCAB, BLOCK)
        weight = _weight(value, ids, base, limit, last, EQUAL)
        sums = before + tl.cumsum(weight, 0)
        # Rounding may leave the sums short of what was summed otherwise.
        final = tl.max(tl.where(weight > 0, ids, 0), 0)
        final = tl.min(tl.where((sums > goal) & (weight > 0), ids, final), 0)
    return final


@triton.jit
def _weight(value, ids, base, limit, last, EQUAL: tl.constexpr):
    if EQUAL:
        weight = ((value == limit) & (ids <= last)).to(tl.float64)
    else:
        weight = tl.where(kept(value, ids, limit, last), tl.exp(value - base), 0.0).to(tl.float64)
    return weight
