"""Drops tokens that are much less likely than the likeliest (Nguyen et al., 2024)."""

import torch


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Masks the tokens whose probability is below `min_p` times the likeliest one's.

    Args:
        logits: [m, vocab].
        min_p: [m]; 0 masks nothing.

    Returns:
        [m, vocab], masked entries -inf.
    """
    # A ratio of probabilities is a difference of logits, so that no softmax is needed.
    floor = logits.amax(-1) + min_p.log()
    return logits.masked_fill(logits < floor[:, None], float("-inf"))
