"""Sharpens or flattens the distribution."""

import torch


def apply_temperature(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Divides [m, vocab] by each row's temperature, [m] and greater than 0."""
    return logits / temperature[:, None]
