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
    numbers, scales = input_numbers(x, rule, scale, zero)
    return numbers.mul_(scales).flatten(1)[:, : x.shape[1]].to(x.dtype)


def input_numbers(
    x: torch.Tensor, rule: Rounding, scale: torch.Tensor | None = None, zero: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers that inputs are rounded to, less the zero point, [n, groups, inputs of a group] float32, and their scales. The
    last group is filled up with zeros. Arguments as for `rounded_inputs`."""
    size = rule.group or max(x.shape[1], 1)
    wide = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % size)).unflatten(1, (-1, size))
    if rule.dynamic:
        largest = INT8_STEPS if rule.number == "int8" else FLOAT8_MAX
        scale = (wide.abs().amax(-1, keepdim=True) / largest).clamp_(min=SMALLEST)
        scale = _next_power(scale) if rule.power_of_two else scale
    else:
        assert scale is not None, "there is a scale where none is dynamic"
        scale = scale.view(-1, 1, 1)
    steps = wide / scale
    if rule.number == "float8":
        return steps.clamp_(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn).float(), scale
    if zero is None:
        return steps.round_().clamp_(-128, 127), scale
    zero = zero.view(-1, 1, 1)
    return steps.add_(zero).round_().clamp_(-128, 127).sub_(zero), scale


def _next_power(scale: torch.Tensor) -> torch.Tensor:
    """The least power of two that is not below, exactly; what is not finite stays."""
    fraction, exponent = torch.frexp(scale)
    return torch.where(scale.isfinite(), torch.ldexp(torch.ones_like(scale), exponent - fraction.eq(0.5).int()), scale)
