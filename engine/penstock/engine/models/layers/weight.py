"""How a layer names the checkpoint tensors that it takes."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from penstock.engine.models.layers.linear_method import LinearMethod


class LinearPart(NamedTuple):
    """Which outputs of which linear layer a weight stands for: where an adapter of it belongs."""

    method: LinearMethod
    offset: int
    """Of its outputs among the layer's, the rank's own."""
    size: int
    """The rank's outputs."""
    narrow: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """The rank's part of an adapter's factors, [r, in] and [out, r]. Holds nothing of the layer."""


class Weight(NamedTuple):
    """A tensor of the checkpoint: its whole shape, and what takes it (and keeps the rank's part)."""

    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], None]
    part: LinearPart | None = None
    """Of the weight of a linear layer."""


Weights = dict[str, Weight]
"""By the tensor's name in the checkpoint."""


def prefixed(prefix: str, weights: Weights) -> Weights:
    """The same weights under `prefix.name`."""
    return {f"{prefix}.{name}": weight for name, weight in weights.items()}


def fused(weights: Weights, parts: tuple[str, ...], name: str) -> Weights:
    """The same weights where the checkpoint holds some as one, their rows in this order.

    Args:
        weights: Among them `….part.weight`, or of another kind, of each part.
        parts: Names without prefix.
        name: Under which the checkpoint has them, in place of the parts'.
    """
    found = dict(weights)
    for first in [key for key in weights if key.split(".")[-2:-1] == [parts[0]]]:
        *prefix, _, kind = first.split(".")
        members = [found.pop(".".join((*prefix, part, kind))) for part in parts]
        rows = [member.shape[0] for member in members]
        found[".".join((*prefix, name, kind))] = Weight(
            (sum(rows), *members[0].shape[1:]), _loader(members, rows), _part(members, rows)
        )
    return found


def _part(members: list[Weight], rows: list[int]) -> LinearPart | None:
    """Of neighbours in one layer, together."""
    parts = [member.part for member in members if member.part is not None]
    if len(parts) < len(members):
        return None

    narrows = [part.narrow for part in parts]

    def narrow(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a, torch.cat([each(a, own)[1] for each, own in zip(narrows, b.split(rows), strict=True)])

    return LinearPart(parts[0].method, parts[0].offset, sum(part.size for part in parts), narrow)


def _loader(members: list[Weight], rows: list[int]) -> Callable[[torch.Tensor], None]:
    def load(value: torch.Tensor) -> None:
        for member, part in zip(members, value.split(rows), strict=True):
            member.load(part)

    return load
