"""A linear layer whose weight and inputs are both whole numbers of eight bits.

Products and their sums are whole numbers, and exact. What is rounded, and when, is a part of the definition: a group's sum
becomes float32, is multiplied by the weight's scale and then by the inputs' scale, and is added to the groups before it, to begin
with the bias. Each of these steps is rounded to float32, and the result to the dtype. So all forms have the same bits, in any
batch.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from penstock.kernels.quantized_linear.reference import LANES, padded, panels_of_groups
from penstock.kernels.quantized_linear.rounding import Rounding, input_numbers

TOGETHER = 4
"""Inputs whose numbers stand side by side, since one instruction adds up their products."""
MOST = 1 << 15
"""Inputs whose sum surely fits into 32 bits: numbers less zero points are 255 at most."""


class IntegerWeight(NamedTuple):
    """A weight [out, in]: each number, less its group's zero point, times its group's scale."""

    values: torch.Tensor
    """[⌈out / 16⌉, quads of inputs, 16, 4] int8. A group's inputs are filled up with zeros to whole quads."""
    scales: torch.Tensor
    """[⌈out / 16⌉, groups, 16] float32."""
    sums: torch.Tensor
    """[⌈out / 16⌉, groups, 16] int32: of the numbers of a group."""
    zeros: torch.Tensor | None
    """[⌈out / 16⌉, groups, 16] int8. None: all are 0."""
    group: int
    """Inputs that share a scale, of the weight and of the inputs. The last group may be shorter."""
    out_features: int
    in_features: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self if isinstance(tensor, torch.Tensor))


def takes(number: str, rule: Rounding | None) -> bool:
    """Whether a weight of such numbers and inputs that are rounded so meet as whole numbers."""
    return number == "int8" and rule is not None and rule.number == "int8"


def pack_integers(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int, rule: Rounding
) -> IntegerWeight:
    """Brings a weight into the kernels' order.

    Args:
        values: int8 [out, in].
        scales: [out, groups of the weight].
        zeros: int8 [out, groups of the weight]; None: all are 0.
        group: Inputs that share a scale of the weight.
        rule: How inputs are rounded.
    """
    rows, inputs = values.shape
    shorter = [size for size in (group, rule.group, MOST) if size is not None and size < inputs]
    common = math.gcd(*shorter) if shorter else inputs
    first = torch.arange(0, inputs, common, device=values.device)
    groups = padded(values, -inputs % common, -rows % LANES).unflatten(1, (-1, common))
    whole = (len(first) - 1) * _whole_quads(common) + _whole_quads(inputs - int(first[-1]))
    quads = (F.pad(groups, (0, _whole_quads(common) - common)) if common % TOGETHER else groups).flatten(1)[:, :whole]
    panels = quads.unflatten(1, (-1, TOGETHER)).unflatten(0, (-1, LANES)).transpose(1, 2).contiguous()
    # torch would widen all numbers before it adds them up.
    sums = panels_of_groups(torch.from_numpy(groups[:rows].numpy().sum(2, dtype=np.int32)))
    own = first // group
    kept = None if zeros is None or not zeros.any() else panels_of_groups(zeros[:, own])
    return IntegerWeight(panels, panels_of_groups(scales.float()[:, own]), sums, kept, common, rows, inputs)


def _whole_quads(inputs: int) -> int:
    return -(-inputs // TOGETHER) * TOGETHER


def whole_numbers(weight: IntegerWeight) -> torch.Tensor:
    """The numbers less their zero points, float64 [out, in]."""
    each = _whole_quads(weight.group)
    flat = weight.values.transpose(1, 2).flatten(2).flatten(0, 1)[: weight.out_features]
    groups = F.pad(flat, (0, -flat.shape[1] % each)).unflatten(1, (-1, each))[:, :, : weight.group].double()
    if weight.zeros is not None:
        groups = groups - weight.zeros.transpose(1, 2).flatten(0, 1)[: weight.out_features, :, None]
    return groups.flatten(1)[:, : weight.in_features]


def integer_linear(
    x: torch.Tensor,
    weight: IntegerWeight,
    rule: Rounding,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """x, rounded to whole numbers, · weightᵀ + bias.

    Args:
        x: [n, in].
        weight: From `pack_integers`.
        rule: How x is rounded: to int8.
        scale: [1] float32, of a rule that is not dynamic; else None.
        zero: [1] float32, a whole number, of one that is not symmetric; else None.
        bias: [out] or None.

    Returns:
        [n, out] in x's dtype. Where an input is not a number, the row is none.
    """
    rounded, scales = input_numbers(x, rule, scale, zero)
    scales = torch.where(rounded.isnan().any(2, keepdim=True), torch.nan, scales)[:, :, 0]
    inputs = rounded.nan_to_num_().flatten(1).double()
    numbers, per_group = whole_numbers(weight), weight.scales.transpose(1, 2).flatten(0, 1)[: weight.out_features]
    total = x.new_zeros(len(x), weight.out_features, dtype=torch.float32)
    if bias is not None:
        total += bias.float()
    for group, first in enumerate(range(0, weight.in_features, weight.group)):
        columns = slice(first, min(first + weight.group, weight.in_features))
        sums = (inputs[:, columns] @ numbers[:, columns].T).float()
        total += sums * per_group[:, group] * scales[:, first // (rule.group or weight.in_features), None]
    return total.to(x.dtype)
