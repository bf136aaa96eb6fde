"""Keeps the nucleus: the smallest set of likeliest tokens whose probability reaches p (Holtzman et al., 2019)."""

import torch


def apply_top_p(sorted_logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Masks the tokens before which the probabilities already add up to p; the first always stays.

    Args:
        sorted_logits: [m, vocab], descending.
        top_p: [m], in (0, 1]; 1 masks nothing.

    Returns:
        [m, vocab], masked entries -inf.
    """
    probabilities = torch.softmax(sorted_logits, dim=-1, dtype=torch.float64)
    before = probabilities.cumsum(-1) - probabilities
    outside = (before >= top_p[:, None]) & (top_p < 1.0)[:, None]
    outside[:, 0] = False
    return sorted_logits.masked_fill(outside, float("-inf"))
