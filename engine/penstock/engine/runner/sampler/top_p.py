"""Keeps the nucleus: the smallest set of likeliest tokens whose probability reaches p (Holtzman et al., 2019)."""

import torch


def apply_top_p(sorted_logits: torch.Tensor, top_p: torch.Tensor, log_mass: torch.Tensor) -> torch.Tensor:
    """Masks the tokens before which the probabilities already add up to p; the first always stays.

    Args:
        sorted_logits: [m, n], descending: the likeliest tokens, or all.
        top_p: [m], in (0, 1]; 1 masks nothing.
        log_mass: [m]: logarithm of the sum of e^logit over all tokens that may stay, those that are not among the n included.

    Returns:
        [m, n], masked entries -inf.
    """
    probabilities = (sorted_logits.double() - log_mass.double()[:, None]).exp()
    before = probabilities.cumsum(-1) - probabilities
    outside = (before >= top_p[:, None]) & (top_p < 1.0)[:, None]
    outside[:, 0] = False
    return sorted_logits.masked_fill(outside, float("-inf"))
