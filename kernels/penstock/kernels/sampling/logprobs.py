"""Log probabilities of tokens and of the likeliest ones on a GPU: from a scan of the row, without a sort."""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportOperatorIssue=false, reportCallIssue=false
# Triton's language is Python with other types.

import torch
import triton
import triton.language as tl

from penstock.kernels.sampling.buffers import Path, SamplingBuffers
from penstock.kernels.sampling.reference import RowLogprobs
from penstock.kernels.sampling.triton import scan

_BLOCK = 4096


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["token_ids", "counts"])
def logprobs_kernel(
    logits, row_stride, token_ids, counts, out, ranks, top_ids, top, bad, tile_max, tile_bad, chunk_mass, candidates,
    candidate_ids, width,
    VOCAB: tl.constexpr, TILES: tl.constexpr, TILES_PAD: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_PAD: tl.constexpr,
    CANDIDATES: tl.constexpr, BLOCK: tl.constexpr, NORMALISED: tl.constexpr,
):  # fmt: skip
    """Grid (k)."""
    row = tl.program_id(0).to(tl.int64)
    x = logits + row * row_stride
    most = tl.max(_tiles(tile_max + row * TILES, TILES, TILES_PAD, float("-inf")), 0)
    broken = _tiles(tile_bad + row * TILES, TILES, TILES_PAD, 0)
    tl.store(bad + row * 2, tl.sum(broken & 0xFFFF, 0))
    tl.store(bad + row * 2 + 1, tl.sum(broken >> 16, 0))
    log_sum = tl.zeros([], tl.float32)
    base = tl.zeros([], tl.float32)
    if NORMALISED:
        chunk = tl.arange(0, CHUNKS_PAD)
        mass = tl.load(chunk_mass + row * CHUNKS + chunk, chunk < CHUNKS, 0.0)
        greatest = tl.load(tile_max + row * TILES + chunk % TILES, chunk < CHUNKS, float("-inf"))
        base = most
        shares = tl.where(greatest > float("-inf"), mass * tl.exp(greatest - most), 0.0)
        log_sum = tl.log(tl.sum(shares.to(tl.float64), 0)).to(tl.float32)
    token = tl.load(token_ids + row)
    mine = tl.load(x + token).to(tl.float32)
    tl.store(out + row, mine - base - log_sum)
    above = tl.zeros([BLOCK], tl.int32)
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        above += (tl.load(x + ids, ids < VOCAB, float("-inf")).to(tl.float32) > mine).to(tl.int32)
    tl.store(ranks + row, tl.sum(above, 0))

    asked = tl.load(counts + row)
    at = tl.arange(0, TILES_PAD * CANDIDATES)
    there = at < TILES * CANDIDATES
    value = tl.load(candidates + row * TILES * CANDIDATES + at, there, float("-inf"))
    ids = tl.load(candidate_ids + row * TILES * CANDIDATES + at, there, -1)
    for place in range(width):
        # Of equals the smallest id; masked tokens come last, and padding never.
        best = tl.max(tl.where(ids >= 0, value, float("-inf")), 0)
        which = tl.min(tl.where((value == best) & (ids >= 0), ids, VOCAB), 0)
        given = (place < asked) & (which < VOCAB)
        tl.store(top_ids + row * width + place, tl.where(given, which, -1))
        tl.store(top + row * width + place, tl.where(given, best - base - log_sum, float("-inf")))
        ids = tl.where(ids == which, -1, ids)


@triton.jit
def _tiles(values, TILES: tl.constexpr, TILES_PAD: tl.constexpr, other):
    tile = tl.arange(0, TILES_PAD)
    return tl.load(values + tile, tile < TILES, other)


def logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    counts: torch.Tensor,
    width: int,
    normalised: bool,
    buffers: SamplingBuffers,
    masked: bool = False,
) -> RowLogprobs:
    """See the reference."""
    number, vocab, device = len(logits), logits.shape[1], logits.device
    candidates = buffers.candidates.shape[2]
    if width > candidates:
        raise ValueError(f"{width} alternatives: more than {candidates}")
    found = RowLogprobs(
        torch.empty(number, dtype=torch.float32, device=device),
        torch.empty(number, dtype=torch.int32, device=device),
        torch.empty(number, width, dtype=torch.int32, device=device),
        torch.empty(number, width, dtype=torch.float32, device=device),
        torch.empty(number, 2, dtype=torch.int32, device=device),
    )
    if not number:
        return found
    scan(logits, counts, counts, buffers, Path.FILTERED, masked=masked, plain=True)
    tiles, chunks = buffers.tile_max.shape[1], buffers.chunk_mass.shape[1]
    logprobs_kernel[(number,)](
        logits, logits.stride(0), token_ids, counts, *found, buffers.tile_max, buffers.tile_bad, buffers.chunk_mass,
        buffers.candidates, buffers.candidate_ids, width,
        VOCAB=vocab, TILES=tiles, TILES_PAD=triton.next_power_of_2(tiles), CHUNKS=chunks,
        CHUNKS_PAD=triton.next_power_of_2(chunks), CANDIDATES=candidates, BLOCK=min(_BLOCK, triton.next_power_of_2(vocab)),
        NORMALISED=normalised, num_warps=8,
    )  # fmt: skip
    return found
