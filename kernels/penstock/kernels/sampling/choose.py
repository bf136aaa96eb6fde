"""A row's token, from what its tiles have found: a program a row, whose candidates are all in registers."""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# Triton's language is Python with other types.

import triton
import triton.language as tl

from penstock.kernels.dependent_launch import wait
from penstock.kernels.sampling.device import (
    filters_of,
    finite_or_nothing,
    first_exceeding,
    highest_reaching,
    kept,
    key_of,
    temperature_of,
    uniform_of,
)


@triton.jit
def choose_kernel(
    logits, row_stride, rows, positions, table, result, threshold, last_id, tile_max, tile_argmax, tile_bad, tile_cut,
    chunk_mass, candidates, candidate_ids, wide,
    VOCAB: tl.constexpr, TILES: tl.constexpr, TILES_PAD: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
    CHUNK: tl.constexpr, CANDIDATES: tl.constexpr, DRAW: tl.constexpr, FILTER: tl.constexpr, SHIFT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (m); sets `wide` where the candidates do not say what the filters leave. SHIFT: see `scan_kernel`."""
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES_PAD)
    has = tile < TILES
    tops = tl.load(tile_max + row * TILES + tile, has, float("-inf"))
    most = tl.max(tops, 0)
    token = tl.min(tl.where((tops == most) & has, tl.load(tile_argmax + row * TILES + tile, has, 0), VOCAB), 0)
    limit, last = tl.full([], float("-inf"), tl.float32), tl.full([], VOCAB, tl.int32)
    undecided = tl.zeros([], tl.int32)
    if DRAW:
        request = tl.load(rows + row).to(tl.int64)
        temperature = temperature_of(table, request)
        if (temperature > 0) & (most > float("-inf")):
            random = uniform_of(table, request, tl.load(positions + row))
            base = tl.div_rn(most, temperature)
            chunk = tl.arange(0, CHUNKS_PAD)
            mass = _rescaled(chunk_mass + row * CHUNKS, tile_max + row * TILES, chunk, temperature, base, TILES, CHUNKS)
            log_min_p, top_k, top_p = filters_of(table, request)
            total = tl.sum(mass, 0)
            plain = True
            if FILTER:
                plain = (log_min_p == float("-inf")) & (top_k <= 0) & (top_p >= 1)
            # Of the two forms the first, so that chunks leave their registers to candidates.
            if plain:
                token = _among_all(logits + row * row_stride, chunk, mass, temperature, base, random, VOCAB, CHUNK)
            if FILTER and not plain:
                cut = tl.div_rn(tl.max(tl.load(tile_cut + row * TILES + tile, has, float("-inf")), 0), temperature)
                at = tl.arange(0, TILES_PAD * CANDIDATES)
                there = at < TILES * CANDIDATES
                value = tl.load(candidates + row * TILES * CANDIDATES + at, there, float("-inf"))
                token, limit, last, undecided = _among_candidates(
                    tl.div_rn(value, temperature), key_of(value) >> SHIFT, candidate_ids + row * TILES * CANDIDATES + at, there,
                    base, key_of(most) >> SHIFT, cut, total, log_min_p, top_k, top_p, random, VOCAB, CANDIDATES)  # fmt: skip
    bad = tl.load(tile_bad + row * TILES + tile, has, 0)
    to = result + row * 4
    tl.store(to, token)
    tl.store(to + 1, tl.sum(bad & 0xFFFF, 0))
    tl.store(to + 2, tl.sum(bad >> 16, 0))
    tl.store(to + 3, (most == float("-inf")).to(tl.int32))
    tl.store(threshold + row, limit)
    tl.store(last_id + row, last)
    tl.store(wide + row, undecided)


@triton.jit
def _rescaled(chunk_mass, tile_max, chunk, temperature, base, TILES: tl.constexpr, CHUNKS: tl.constexpr):
    """The chunks' probability mass in relation to the row's likeliest token, float64."""
    mass = tl.load(chunk_mass + chunk, chunk < CHUNKS, 0.0)
    top = tl.load(tile_max + chunk % TILES, chunk < CHUNKS, float("-inf"))
    factor = tl.exp(tl.div_rn(top, temperature) - base)
    # A tile without any has been summed in relation to 0.
    return tl.where(top > float("-inf"), mass.to(tl.float64) * factor.to(tl.float64), 0.0)


@triton.jit
def _among_all(logits, chunk, mass, temperature, base, random, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """Inverts the CDF over all tokens: first the chunk, then the token in it."""
    sums = tl.cumsum(mass, 0)
    goal = random * tl.max(sums, 0)
    # A sum that rounding has left short of the goal: the last chunk that has any probability.
    last = tl.max(tl.where(mass > 0, chunk, 0), 0)
    which = tl.minimum(tl.min(tl.where((sums > goal) & (mass > 0), chunk, last), 0), last)
    before = tl.sum(tl.where(chunk == which, sums - mass, 0.0), 0)
    at = tl.arange(0, CHUNK)
    ids = which * CHUNK + at
    x = finite_or_nothing(tl.load(logits + ids, ids < VOCAB, float("-inf")).to(tl.float32))
    inner = tl.exp(tl.div_rn(x, temperature) - base).to(tl.float64)
    last = tl.max(tl.where(x > float("-inf"), at, 0), 0)
    last = tl.where(tl.max(inner, 0) > 0, tl.max(tl.where(inner > 0, at, 0), 0), last)
    place = tl.min(tl.where((before + tl.cumsum(inner, 0) > goal) & (inner > 0), at, last), 0)
    return which * CHUNK + place


@triton.jit
def _among_candidates(
    value, key, ids, there, base, high, cut, total, log_min_p, top_k, top_p, random,
    VOCAB: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Token, limit and last id of what the filters leave; and whether tokens that are no candidates could have a say. Keys are in
    the order of logits, up to `high`. `ids`: where they lie; read again whenever they are used, for want of registers."""
    floor = base + log_min_p
    alive = (value >= floor) & (value > float("-inf"))
    certain = (floor > cut) | (cut == float("-inf")) | ((top_k > 0) & (top_k <= CANDIDATES))
    limited = (top_k > 0) & (top_k < VOCAB)
    if limited & (tl.sum(alive.to(tl.int32), 0) > top_k):
        weight = alive.to(tl.float64)
        limit = highest_reaching(value, key, weight, top_k.to(tl.float64), high)
        left = top_k - tl.sum((alive & (value > limit)).to(tl.int32), 0)
        last = first_exceeding(tl.load(ids, there, 0), tl.where(value == limit, weight, 0.0), left.to(tl.float64) - 0.5)
        alive = alive & kept(value, tl.load(ids, there, 0), limit, last)
        certain = certain | (limit > cut)
    mass = tl.where(alive, tl.exp(value - base).to(tl.float64), 0.0)
    if top_p < 1:
        # Without other filters, tokens that are no candidates count too.
        open_ended = (log_min_p == float("-inf")) & (limited == 0)
        goal = top_p * tl.where(open_ended, total, tl.sum(mass, 0))
        if tl.sum(mass, 0) >= goal:
            limit = highest_reaching(value, key, mass, goal, high)
            each = tl.exp(limit - base).to(tl.float64)
            equal = alive & (value == limit)
            # At least one: what is above does not reach the goal.
            short = tl.ceil((goal - tl.sum(tl.where(value > limit, mass, 0.0), 0)) / each)
            last = first_exceeding(tl.load(ids, there, 0), equal.to(tl.float64), tl.maximum(short, 1.0) - 0.5)
            alive = alive & kept(value, tl.load(ids, there, 0), limit, last)
            mass = tl.where(alive, mass, 0.0)
            certain = tl.where(open_ended, (limit > cut) | (cut == float("-inf")), certain)
        else:
            certain = certain & (open_ended == 0) | (cut == float("-inf"))
    token = first_exceeding(tl.load(ids, there, 0), mass, random * tl.sum(mass, 0))
    limit = tl.min(tl.where(alive, value, float("inf")), 0)
    last = tl.max(tl.where(alive & (value == limit), tl.load(ids, there, 0), -1), 0)
    return token, limit, last, (certain == 0).to(tl.int32)
