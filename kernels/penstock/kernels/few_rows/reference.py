"""Linear layers of few rows with what stands before and after them: a norm before, a gate or the residual stream after.

A decode step of few requests is bound by how many kernels are launched; a decoder layer is six launches of these and attention.
"""

from typing import Literal

import torch
import torch.nn.functional as F

from penstock.kernels.gated_mul.reference import gelu_tanh_mul, silu_mul
from penstock.kernels.rms_norm.reference import rms_norm

MAX_ROWS = 16
"""Rows for which these are meant: one tile of a tensor core's."""

Activation = Literal["silu", "gelu_tanh"]


def norm_linear(x: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A linear layer of normalised rows.

    Args:
        x: [n, in], contiguous.
        norm: [in], float32: the weight of an RMSNorm.
        eps: Added to the mean square.
        weight: [out, in], in x's dtype.
        bias: [out], in x's dtype; None: there is none.

    Returns:
        [n, out] in x's dtype.
    """
    return F.linear(rms_norm(x, norm, eps), weight, bias)


def norm_gated_linear(
    x: torch.Tensor, norm: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation
) -> torch.Tensor:
    """The hidden layer of a gated MLP, of normalised rows.

    Args:
        x: As for `norm_linear`.
        norm: As for `norm_linear`.
        eps: As for `norm_linear`.
        weight: [2 d, in]: the gate's rows, then the up projection's.
        bias: [2 d].
        activation: Of the gate.

    Returns:
        [n, d] in x's dtype.
    """
    return {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}[activation](norm_linear(x, norm, eps, weight, bias))


def linear_add(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
    """A linear layer whose result is added to the residual stream.

    Args:
        x: [n, in], contiguous.
        weight: [out, in], in x's dtype.
        bias: [out], in x's dtype; None: there is none.
        residual: [n, out], contiguous.

    Returns:
        [n, out] in x's dtype: the sum.
    """
    return F.linear(x, weight, bias) + residual
