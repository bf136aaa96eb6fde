"""Rounding of a linear layer's inputs to eight bits, as checkpoints ask for that were quantized with it.

Rounded inputs keep the model's dtype: a number times its scale in float32, rounded to the dtype once. The product is then that of
weight-only schemes. A scale belongs to a token or a group of its inputs, never to a batch, so that a token's bits depend on
itself alone.
"""

from typing import Literal, NamedTuple

import torch

INT8_STEPS = 127.5
"""The largest magnitude stands for so many steps, as in compressed-tensors."""
FLOAT8_MAX = 448.0
SMALLEST = torch.finfo(torch.float32).tiny
"""A scale where all inputs are zero."""


class Rounding(NamedTuple):
    """How a linear layer's inputs are rounded."""

    number: Literal["int8", "float8"]
    dynamic: bool
    """Whether each token has scales of its own; else the layer has one."""
    group: int | None = None
    """Inputs of a token that share a dynamic scale; None: all."""
    power_of_two: bool = False
    """Whether a dynamic scale is the next power of two."""


def rounded_inputs(
    x: torch.Tensor, rule: Rounding, scale: torch.Tensor | None = None, zero: torch.Tensor | None = None
) -> torch.Tensor:
    """Rounds a layer's inputs.

    Args:
        x: [n, in].
        rule: How.
        scale: [1] float32, of a rule that is not dynamic.
        zero: [1] float32, of one that is not symmetric; else None.

    Returns:
        [n, in] in x's dtype.
    """
    wide = x.float()
    if rule.group is not None:
        missing = -x.shape[1] % rule.group
        wide = torch.nn.functional.pad(wide, (0, missing)).unflatten(1, (-1, rule.group))
    if rule.dynamic:
        largest = INT8_STEPS if rule.number == "int8" else FLOAT8_MAX
        scale = (wide.abs().amax(-1, keepdim=True) / largest).clamp_(min=SMALLEST)
        scale = _next_power(scale) if rule.power_of_two else scale
    assert scale is not None, "there is a scale where none is dynamic"
    steps = wide / scale
    if rule.number == "float8":
        rounded = steps.clamp_(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn).float()
    elif zero is None:
        rounded = steps.round_().clamp_(-128, 127)
    else:
        rounded = steps.add_(zero).round_().clamp_(-128, 127).sub_(zero)
    result = rounded.mul_(scale)
    return (result if rule.group is None else result.flatten(1)[:, : x.shape[1]]).to(x.dtype)


def _next_power(scale: torch.Tensor) -> torch.Tensor:
    """The least power of two that is not below, exactly; what is not finite stays."""
    fraction, exponent = torch.frexp(scale)
    return torch.where(scale.isfinite(), torch.ldexp(torch.ones_like(scale), exponent - fraction.eq(0.5).int()), scale)
