"""Root mean square normalisation (Zhang and Sennrich, 2019), in float32 whatever the input's dtype."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalises the last dimension.

    Args:
        x: [..., d].
        weight: [d], float32.
        eps: Added to the mean square.

    Returns:
        [..., d] in x's dtype.
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (scaled * weight).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds the residual stream and normalises the sum.

    Args:
        x: [n, d]: a sublayer's output.
        residual: [n, d].
        weight: [d], float32.
        eps: Added to the mean square.

    Returns:
        The normalised sum and the sum, both [n, d] in x's dtype.
    """
    total = x + residual
    return rms_norm(total, weight, eps), total
