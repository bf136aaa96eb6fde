"""Rotary position embedding (Su et al., 2021) with the head's two halves paired, as Hugging Face's checkpoints expect."""

import torch


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates each pair (x[i], x[i + d/2]) by the angle of the token's position, in float32.

    Args:
        x: [n, heads, d].
        cos: [n, d/2], float32.
        sin: [n, d/2], float32.

    Returns:
        [n, heads, d] in x's dtype.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
