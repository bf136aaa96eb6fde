"""Draws a token by inverting the cumulative distribution: one random number a row, no synchronisation, no generator."""

import torch


def draw(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draws one token a row from softmax(logits).

    Args:
        logits: [m, vocab]; -inf never comes out.
        uniforms: [m], float64 in [0, 1).

    Returns:
        [m], int64.
    """
    cumulative = torch.softmax(logits, dim=-1, dtype=torch.float64).cumsum(-1)
    # The first token whose cumulative probability is above the number: it has a probability of its own above 0.
    return torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True).squeeze(-1)
