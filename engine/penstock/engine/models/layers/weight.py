"""How a layer names the checkpoint tensors that it takes."""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Weight(NamedTuple):
    """A tensor of the checkpoint: its whole shape, and what takes it (and keeps the rank's part)."""

    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], None]


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
        found[".".join((*prefix, name, kind))] = Weight((sum(rows), *members[0].shape[1:]), _loader(members, rows))
    return found


def _loader(members: list[Weight], rows: list[int]) -> Callable[[torch.Tensor], None]:
    def load(value: torch.Tensor) -> None:
        for member, part in zip(members, value.split(rows), strict=True):
            member.load(part)

    return load
