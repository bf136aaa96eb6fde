"""Keeps the k likeliest tokens (Fan et al., 2018)."""

import torch


def apply_top_k(sorted_logits: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Masks all but the first k of each row.

    Args:
        sorted_logits: [m, vocab], descending.
        top_k: [m], int64; 0 masks nothing.

    Returns:
        [m, vocab], masked entries -inf.
    """
    vocab = sorted_logits.shape[-1]
    count = torch.where(top_k > 0, top_k, vocab)
    return sorted_logits.masked_fill(torch.arange(vocab) >= count[:, None], float("-inf"))
