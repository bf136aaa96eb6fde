"""The likeliest token."""

import torch


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """[m, vocab] → [m], int64; of equals the one with the smallest id."""
    if logits.device.type == "cpu":  # numpy reads a vector at a time: torch takes ten times as long
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)
