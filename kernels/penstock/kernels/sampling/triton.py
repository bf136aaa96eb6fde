"""Choosing a token a row on a GPU, without a sort: one look at the logits, then what it has found.

Three launches, whose grids follow from the number of rows and the vocabulary alone: `scan` (a program a tile), `choose` (a
program a row) and `wide` (a program a row, which ends at once for rows whose candidates sufficed).
"""

# pyright: reportCallIssue=false
# Triton types a launch without its options.

import torch
import triton

from penstock.kernels.dependent_launch import early
from penstock.kernels.sampling.buffers import CHUNK, Path, SamplingBuffers, tile_size
from penstock.kernels.sampling.choose import choose_kernel
from penstock.kernels.sampling.scan import scan_kernel
from penstock.kernels.sampling.wide import wide_kernel

_WIDE_BLOCK = 4096
_CHOOSE_REGISTERS = 128
"""A thread, of 256: two programs a multiprocessor."""
_ALIKE = {torch.bfloat16: 16, torch.float16: 13}
"""Low bits of a float32 that are the same in all numbers of a dtype."""


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    params: torch.Tensor,
    buffers: SamplingBuffers,
    path: Path,
    masked: bool = False,
) -> torch.Tensor:
    """See the reference; the last dimension of `logits` contiguous."""
    number = len(rows)
    if not number:
        return buffers.result[:0]
    scan(logits, rows, params, buffers, path, masked=masked)
    b, vocab, tiles, chunks = buffers, logits.shape[1], buffers.tile_max.shape[1], buffers.chunk_mass.shape[1]
    tiles_pad, candidates = triton.next_power_of_2(tiles), buffers.candidates.shape[2]
    choose_kernel[(number,)](
        logits, logits.stride(0), rows, positions, params, b.result, b.threshold, b.last_id, b.tile_max, b.tile_argmax,
        b.tile_bad, b.tile_cut, b.chunk_mass, b.candidates, b.candidate_ids, b.wide,
        VOCAB=vocab, TILES=tiles, TILES_PAD=tiles_pad, CHUNKS=chunks, CHUNKS_PAD=triton.next_power_of_2(chunks), CHUNK=CHUNK,
        CANDIDATES=candidates, DRAW=path > Path.GREEDY, FILTER=path == Path.FILTERED,
        SHIFT=_ALIKE.get(logits.dtype, 0), **early(logits.device), num_warps=8, maxnreg=_CHOOSE_REGISTERS,
    )  # fmt: skip
    if path == Path.FILTERED:
        wide_kernel[(number,)](
            logits, logits.stride(0), rows, positions, params, b.result, b.threshold, b.last_id, b.tile_max, b.wide,
            VOCAB=vocab, TILES=tiles, TILES_PAD=tiles_pad, BLOCK=min(_WIDE_BLOCK, triton.next_power_of_2(vocab)),
            **early(logits.device), num_warps=16,
        )  # fmt: skip
    return buffers.result[:number]


def scan(
    logits: torch.Tensor,
    rows: torch.Tensor,
    params: torch.Tensor,
    buffers: SamplingBuffers,
    path: Path,
    masked: bool = False,
    plain: bool = False,
) -> None:
    """Fills the buffers' tiles, chunks and candidates; `plain`: at temperature 1, with candidates, whatever the parameters."""
    b, vocab, tiles = buffers, logits.shape[1], buffers.tile_max.shape[1]
    tile = tile_size(vocab)
    scan_kernel[(tiles, len(logits))](
        logits, logits.stride(0), rows, params, b.tile_max, b.tile_argmax, b.tile_bad, b.tile_cut, b.chunk_mass, b.candidates,
        b.candidate_ids,
        VOCAB=vocab, TILES=tiles, TILE=tile, CHUNKS=b.chunk_mass.shape[1], CHUNK=CHUNK, CANDIDATES=b.candidates.shape[2],
        MASKED=masked, DRAW=path > Path.GREEDY, FILTER=path == Path.FILTERED, PLAIN=plain,
        SHIFT=_ALIKE.get(logits.dtype, 0), **early(logits.device), num_warps=max(1, min(16, tile // 512)),
    )  # fmt: skip
