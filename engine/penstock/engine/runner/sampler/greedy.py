"""The likeliest token."""

import torch


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """[m, vocab] → [m], int64; of equals the one with the smallest id."""
    return logits.argmax(-1)
