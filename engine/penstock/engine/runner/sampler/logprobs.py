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
    """[m, k], int64, likeliest first, of equals the smallest id; -1 past a row's own number."""
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
    top_logprobs, top_ids = _likeliest(logprobs, width)
    unasked = torch.arange(width) >= counts[:, None]
    return RowLogprobs(
        sampled.squeeze(-1),
        (logprobs > sampled).sum(-1),
        top_ids.masked_fill(unasked, -1),
        top_logprobs.masked_fill(unasked, float("-inf")),
    )


def _likeliest(logprobs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` greatest of each row and their ids, each [m, count]. Which of equals topk gives depends on `count`, and so on
    what the other rows asked for: here it is the smallest id."""
    values, ids = logprobs.topk(count, dim=-1, sorted=True)
    if not count:
        return values, ids
    at_least_last = (logprobs >= values[:, -1:]).sum(-1)
    values, ids = _by_id(values, ids)
    cut = (at_least_last > count).nonzero().squeeze(-1)  # through equals, some of which are not among them
    if cut.numel():
        most = int(at_least_last[cut].max())
        wider_values, wider_ids = _by_id(*logprobs[cut].topk(most, dim=-1))
        values[cut], ids[cut] = wider_values[:, :count], wider_ids[:, :count]
    return values, ids


def _by_id(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In descending order, of equals the smallest id first."""
    ids, order = ids.sort(dim=-1)
    values, again = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, again)
