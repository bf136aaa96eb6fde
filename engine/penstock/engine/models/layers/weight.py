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
