"""Log probabilities of tokens and of the likeliest ones, or the logits themselves."""

from typing import NamedTuple

import torch


class RowLogprobs(NamedTuple):
    """Of m logits rows."""

    sampled: torch.Tensor
    """[m], float32: of the sampled token."""
    ranks: torch.Tensor
    """[m], int64: how many tokens are likelier."""
    top_ids: torch.Tensor
    """[m, k], int64, likeliest first; -1 past a row's own number."""
    top_logprobs: torch.Tensor
    """[m, k], float32; -inf past a row's own number."""


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, counts: torch.Tensor, width: int | None = None, normalised: bool = True
) -> RowLogprobs:
    """Log probabilities of the sampled tokens and of the likeliest ones.

    Args:
        logits: [m, vocab], float32; -inf where masked.
        token_ids: [m], int64: the sampled tokens.
        counts: [m], int64: alternatives that each row asked for.
        width: k, at least the greatest of `counts`, which it is unless said; the vocabulary is the most.
        normalised: False gives the logits instead.
    """
    logprobs = torch.log_softmax(logits, dim=-1) if normalised else logits
    sampled = logprobs.gather(-1, token_ids[:, None])
    width = min(int(counts.max()) if width is None else width, logits.shape[-1])
    top_logprobs, top_ids = logprobs.topk(width, dim=-1)
    unasked = torch.arange(width) >= counts[:, None]
    return RowLogprobs(
        sampled.squeeze(-1),
        (logprobs > sampled).sum(-1),
        top_ids.masked_fill(unasked, -1),
        top_logprobs.masked_fill(unasked, float("-inf")),
    )
