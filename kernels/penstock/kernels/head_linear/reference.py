"""A linear layer of each head's own: what latent attention does to queries before it, and to results after it."""

from typing import NamedTuple

import torch


class HeadWeight(NamedTuple):
    """The weights of all heads, as a form of the operation has them."""

    tensor: torch.Tensor
    """[heads, out, in]; of the compiled form, each head's as `linear.reference.pack_weight` makes it."""
    out_features: int
    """Of one head."""


def pack_heads(weight: torch.Tensor) -> HeadWeight:
    """[heads, out, in], as it is."""
    return HeadWeight(weight, weight.shape[1])


def head_linear(x: torch.Tensor, weight: HeadWeight) -> torch.Tensor:
    """Each head's inputs times its weight. In the compiled form a row's bits do not depend on the other rows.

    Args:
        x: [n, heads, in]; rows and heads may lie apart.
        weight: From `pack_heads`.

    Returns:
        [n, heads, out] in x's dtype, contiguous.
    """
    return torch.einsum("nhi,hoi->nho", x, weight.tensor).contiguous()
