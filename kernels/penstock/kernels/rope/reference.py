"""Rotary position embedding (Su et al., 2021), two halves paired as Hugging Face's checkpoints expect."""

import torch


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates each pair (x[i], x[i + r/2]) of the first r elements of a head by the angle of the token's position, in float32.

    Args:
        x: [n, heads, d].
        cos: [n, r/2], float32; r is d where the whole head rotates.
        sin: [n, r/2], float32.

    Returns:
        [n, heads, d] in x's dtype.
    """
    half = cos.shape[-1]
    first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)
