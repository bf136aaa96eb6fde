"""The one look at a step's logits: a program a tile of a row finds what the row's choice is then made from."""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# Triton's language is Python with other types.

import triton
import triton.language as tl

from penstock.kernels.dependent_launch import wait
from penstock.kernels.sampling.device import filters_of, finite_or_nothing, key_of, middle, temperature_of


@triton.jit(do_not_specialize_on_alignment=["rows", "table"])
def scan_kernel(
    logits, row_stride, rows, table, tile_max, tile_argmax, tile_bad, tile_cut, chunk_mass, candidates, candidate_ids,
    VOCAB: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    CANDIDATES: tl.constexpr, MASKED: tl.constexpr, DRAW: tl.constexpr, FILTER: tl.constexpr, PLAIN: tl.constexpr,
    SHIFT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, m); see `SamplingBuffers` for what is written.

    MASKED: -inf is no broken logit. DRAW, FILTER: as in `Path`. PLAIN: without parameters: temperature 1, and candidates in any
    case. SHIFT: low bits of a float32 in which logits do not differ.
    """
    wait(EARLY)
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tl.arange(0, TILE)
    ids = ((at // CHUNK) * TILES + tile) * CHUNK + at % CHUNK
    inside = ids < VOCAB
    x = tl.load(logits + row * row_stride + ids, inside, float("-inf")).to(tl.float32)
    infinite = x == float("inf")
    if not MASKED:
        infinite |= (x == float("-inf")) & inside
    bad = tl.sum((x != x).to(tl.int32) + (infinite.to(tl.int32) << 16), 0)
    x = finite_or_nothing(x)
    most = tl.max(x, 0)
    to = row * TILES + tile
    tl.store(tile_bad + to, bad)
    tl.store(tile_max + to, most)
    tl.store(tile_argmax + to, tl.min(tl.where(x == most, ids, VOCAB), 0))
    if DRAW:
        if PLAIN:
            temperature = 1.0
            wanted = True
        else:
            request = tl.load(rows + row).to(tl.int64)
            temperature = temperature_of(table, request)
            log_min_p, top_k, top_p = filters_of(table, request)
            wanted = (temperature > 0) & ((log_min_p > float("-inf")) | (top_k > 0) | (top_p < 1))
        if temperature > 0:
            base = tl.where(most == float("-inf"), 0.0, tl.div_rn(most, temperature))
            mass = tl.exp(tl.div_rn(x, temperature) - base)
            sums = tl.sum(tl.reshape(mass, [TILE // CHUNK, CHUNK]), 1)
            chunk = tl.arange(0, TILE // CHUNK) * TILES + tile
            tl.store(chunk_mass + row * CHUNKS + chunk, sums, chunk < CHUNKS)
        if FILTER and wanted:
            first = to * CANDIDATES
            _likeliest(x, ids, inside, most, tile_cut + to, candidates + first, candidate_ids + first, CANDIDATES, SHIFT)


@triton.jit
def _likeliest(x, ids, inside, most, cut, values, value_ids, COUNT: tl.constexpr, SHIFT: tl.constexpr):
    """Stores the COUNT greatest, in no order, of equals those with the smallest ids; masked ones are the least of all."""
    nothing = key_of(tl.full([], float("-inf"), tl.float32)) >> SHIFT
    number = tl.sum(inside.to(tl.int32), 0)
    # From here on the key stands for the token, so that few registers are in use.
    key = tl.where(inside, key_of(x) >> SHIFT, nothing - 1)
    # Of as many groups as are sought each has one that is not below the least of the groups' greatest.
    groups = tl.max(tl.reshape(key, [key.shape[0] // COUNT, COUNT]), 0)
    low, high = tl.maximum(tl.min(groups, 0), nothing), (key_of(most) >> SHIFT) + 1
    while low + 1 < high:
        at = middle(low, high)
        count = tl.sum((key >= at).to(tl.int32), 0)
        high = tl.where(count < COUNT, at, tl.where(count == COUNT, at + 1, high))
        low = tl.where(count < COUNT, low, at)
    # Of fewer than COUNT the search ends at the least of all. A tile has less than 32,768 tokens, so two counts
    # fit into one number.
    counted = (key > low).to(tl.int32) + ((key == low).to(tl.int32) << 16)
    both = tl.sum(counted, 0)
    more, equal = both & 0xFFFF, both >> 16
    below = tl.max(tl.where(key < low, key, nothing), 0)
    tl.store(cut, _of_shifted(tl.where(more + equal > COUNT, low, tl.maximum(below, nothing)), SHIFT))
    rank = tl.cumsum(counted, 0)
    place = tl.where(key > low, rank & 0xFFFF, more + (rank >> 16)) - 1
    taken = (key >= low) & (place < COUNT)
    tl.store(values + place, _of_shifted(key, SHIFT), taken)
    tl.store(value_ids + place, ids, taken)
    slot = tl.arange(0, COUNT)
    tl.store(values + slot, float("-inf"), slot >= number)
    tl.store(value_ids + slot, -1, slot >= number)


@triton.jit
def _of_shifted(key, SHIFT: tl.constexpr):
    return ((key ^ ((key >> 31) & (0x7FFFFFFF >> SHIFT))) << SHIFT).to(tl.float32, bitcast=True)
