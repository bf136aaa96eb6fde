"""How a layer names the checkpoint tensors that it takes."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from penstock.engine.models.layers.linear_method import LinearMethod
from penstock.engine.models.layers.projection import FLOATS


class LinearPart(NamedTuple):
    """Which outputs of which linear layer a tensor belongs to: where an adapter goes."""

    method: LinearMethod
    shape: tuple[int, int]
    """[out, in] of the projection, whole."""
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
    """Of a linear layer's tensor."""
    dtypes: tuple[torch.dtype, ...] = FLOATS
    """Any of these is accepted."""
    output_dim: int | None = 0
    """Along the outputs. None: it has none, such as a scale of the whole projection."""
    turns: bool = False
    """Whether a file may have the last two dimensions in the other order; `load` tells by the shape."""


Weights = dict[str, Weight]
"""By the tensor's name in the checkpoint."""


def prefixed(prefix: str, weights: Weights) -> Weights:
    """The same weights under `prefix.name`."""
    return {f"{prefix}.{name}": weight for name, weight in weights.items()}


def fused(weights: Weights, parts: tuple[str, ...], name: str) -> Weights:
    """The same weights where the checkpoint holds some as one, their outputs in this order.

    Args:
        weights: Among them `….part.weight`, or of another kind, of each part.
        parts: Names without prefix.
        name: Under which the checkpoint has them, in place of the parts'.
    """
    found = dict(weights)
    for first in [key for key in weights if key.split(".")[-2:-1] == [parts[0]]]:
        *prefix, _, kind = first.split(".")
        members = [found.pop(".".join((*prefix, part, kind))) for part in parts]
        found[".".join((*prefix, name, kind))] = _together(members)
    return found


def _together(members: list[Weight]) -> Weight:
    """One tensor that holds those of all members, or one value that all of them share."""
    first, dim = members[0], members[0].output_dim
    part = _part(members)
    if dim is None:
        return first._replace(load=_to_all(members), part=part)
    sizes = [member.shape[dim] for member in members]
    shape = (*first.shape[:dim], sum(sizes), *first.shape[dim + 1 :])
    return first._replace(shape=shape, load=_to_each(members, sizes, dim), part=part)


def _part(members: list[Weight]) -> LinearPart | None:
    """Of neighbours in one layer, together."""
    parts = [member.part for member in members if member.part is not None]
    if len(parts) < len(members):
        return None

    narrows, rows = [part.narrow for part in parts], [part.shape[0] for part in parts]

    def narrow(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a, torch.cat([each(a, own)[1] for each, own in zip(narrows, b.split(rows), strict=True)])

    shape = sum(rows), parts[0].shape[1]
    return LinearPart(parts[0].method, shape, parts[0].offset, sum(part.size for part in parts), narrow)


def _to_each(members: list[Weight], sizes: list[int], dim: int) -> Callable[[torch.Tensor], None]:
    def load(value: torch.Tensor) -> None:
        for member, part in zip(members, value.split(sizes, dim), strict=True):
            member.load(part)

    return load


def _to_all(members: list[Weight]) -> Callable[[torch.Tensor], None]:
    def load(value: torch.Tensor) -> None:
        for member in members:
            member.load(value)

    return load
