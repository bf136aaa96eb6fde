"""Repetition, frequency and presence penalties on a GPU: the tokens of each row are counted where they are, step by step, so
that what was sampled a step ago counts before the host knows it."""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# Triton's language is Python with other types.

import torch
import triton
import triton.language as tl

_TOKENS, _TILE = 1024, 2048
_IN_PROMPT = tl.constexpr(1 << 30)


@triton.jit(do_not_specialize=["row_stride"])
def count_kernel(token_ids, row_stride, rows, begins, ends, counts, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (k, tokens of the longest row): how often the output has each token, and a bit for those of the prompt."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    end, output = tl.load(ends + row), tl.load(begins + row)
    inside = at < end
    token = tl.load(token_ids + tl.load(rows + row).to(tl.int64) * row_stride + at, inside, 0)
    # A prompt may name tokens that the model has no logits for; its request ends with an error.
    inside = inside & (token < VOCAB)
    to = counts + row.to(tl.int64) * VOCAB + token
    tl.atomic_or(to, _IN_PROMPT, inside & (at < output))
    tl.atomic_add(to, 1, inside & (at >= output))


@triton.jit(do_not_specialize=["row_stride"])
def penalise_kernel(logits, row_stride, at, counts, penalties, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """Grid (tiles, k)."""
    row = tl.program_id(1)
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = ids < VOCAB
    count = tl.load(counts + row.to(tl.int64) * VOCAB + ids, inside, 0)
    to = logits + tl.load(at + row).to(tl.int64) * row_stride + ids
    x = tl.load(to, inside & (count > 0), 0.0)
    repetition = tl.load(penalties + row * 3)
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    times = (count & (_IN_PROMPT - 1)).to(tl.float32)
    x = x - times * tl.load(penalties + row * 3 + 1) - tl.where(times > 0, tl.load(penalties + row * 3 + 2), 0.0)
    tl.store(to, x, inside & (count > 0))


def penalise(
    logits: torch.Tensor,
    at: torch.Tensor,
    token_ids: torch.Tensor,
    rows: torch.Tensor,
    begins: torch.Tensor,
    ends: torch.Tensor,
    penalties: torch.Tensor,
    longest: int,
) -> None:
    """See the reference."""
    number, vocab = len(at), logits.shape[1]
    counts = torch.zeros(number, vocab, dtype=torch.int32, device=logits.device)
    grid = (number, max(1, triton.cdiv(longest, _TOKENS)))
    count_kernel[grid](token_ids, token_ids.stride(0), rows, begins, ends, counts, VOCAB=vocab, BLOCK=_TOKENS, num_warps=4)
    tile = min(_TILE, triton.next_power_of_2(vocab))
    # Rounded as on a CPU: no product is added unrounded.
    penalise_kernel[(triton.cdiv(vocab, tile), number)](
        logits, logits.stride(0), at, counts, penalties, VOCAB=vocab, TILE=tile, num_warps=8, enable_fp_fusion=False
    )
