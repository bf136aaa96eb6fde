"""Keeps the nucleus: the smallest set of likeliest tokens whose probability reaches p (Holtzman et al., 2019)."""

import torch


def apply_top_p(sorted_logits: torch.Tensor, top_p: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Masks the tokens before which the probabilities already add up to p; the first always stays.

    Args:
        sorted_logits: [m, n], descending: the likeliest tokens, or all.
        top_p: [m], in (0, 1]; 1 masks nothing.
        mass: [m], float64: the sum of `weigh` over all tokens that may stay, also those that are not among the n.

    Returns:
        [m, n], masked entries -inf.
    """
    # Weights relative to the likeliest token make the sums of equal tokens exact. Rounding could keep a token too many.
    weights = weigh(sorted_logits, sorted_logits)
    before = weights.cumsum(-1) - weights
    outside = (before >= (top_p * mass)[:, None]) & (top_p < 1.0)[:, None]
    outside[:, 0] = False
    return sorted_logits.masked_fill(outside, float("-inf"))


def weigh(logits: torch.Tensor, sorted_logits: torch.Tensor) -> torch.Tensor:
    """e^(logit - greatest) of each of `logits`, [m, n], float64."""
    return (logits - sorted_logits[:, :1]).exp().double()
