"""Rounding of a linear layer's inputs to eight bits, as checkpoints ask for that were quantized with it.

Rounded inputs keep the model's dtype: a number times its scale in float32, rounded to the dtype once. The product is then that of
weight-only schemes. A scale belongs to a token or a group of its inputs, never to a batch, so that a token's bits depend on
itself alone.
"""

import torch

from penstock.engine.quant.scheme import ActivationScheme

INT8_STEPS = 127.5
"""The largest magnitude stands for so many steps, as in compressed-tensors."""
FLOAT8_MAX = 448.0
SMALLEST = torch.finfo(torch.float32).tiny
"""A scale where all inputs are zero."""


def rounded_inputs(
    x: torch.Tensor, scheme: ActivationScheme, scale: torch.Tensor | None = None, zero: torch.Tensor | None = None
) -> torch.Tensor:
    """Rounds a layer's inputs.

    Args:
        x: [n, in].
        scheme: How.
        scale: [1] float32, of a static scheme.
        zero: [1] float32, of one that is not symmetric.

    Returns:
        [n, in] in x's dtype.
    """
    wide = x.float()
    if scheme.group is not None:
        missing = -x.shape[1] % scheme.group
        wide = torch.nn.functional.pad(wide, (0, missing)).unflatten(1, (-1, scheme.group))
    if scheme.dynamic:
        largest = INT8_STEPS if scheme.number == "int8" else FLOAT8_MAX
        scale = (wide.abs().amax(-1, keepdim=True) / largest).clamp_(min=SMALLEST)
    assert scale is not None, "a static scheme has a scale"
    steps = wide / scale
    if scheme.number == "float8":
        rounded = steps.clamp_(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn).float()
    elif zero is None:
        rounded = steps.round_().clamp_(-128, 127)
    else:
        rounded = steps.add_(zero).round_().clamp_(-128, 127).sub_(zero)
    result = rounded.mul_(scale)
    return (result if scheme.group is None else result.flatten(1)[:, : x.shape[1]]).to(x.dtype)
