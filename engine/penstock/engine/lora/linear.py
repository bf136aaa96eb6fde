"""A linear layer with adapters on top: wraps whatever method multiplies by the base weight."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from penstock.engine.models.layers.linear_method import LinearMethod
from penstock.engine.models.layers.projection import LinearLayer, Projection, TensorSpec
from penstock.kernels.lora.batch import LoraBatch
from penstock.kernels.lora.device import DeviceLoraBatch
from penstock.kernels.ops import Ops


class Shelf(Protocol):
    """Room for the adapters of one projection: a `LoraShelf`, or a device's."""

    a: torch.Tensor
    """Its part of the first factors, of all slots."""

    @property
    def nbytes(self) -> int:
        """Memory of all slots."""
        ...

    def put(self, slot: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Fills a slot with [rank, in] and [out, rank]."""
        ...

    def clear(self, slot: int) -> None:
        """Leaves nothing in a slot."""
        ...


class LoraLinearMethod:
    """The base runs for all tokens, as it would alone; then each token's adapter is added.

    Args:
        base: What multiplies by the layer's own weight.
        layer: See LinearLayer.
        ops: With `lora_shelves` and `add_lora`.
        batch: The step's, filled before the forward pass.
    """

    def __init__(self, base: LinearMethod, layer: LinearLayer, ops: Ops, batch: LoraBatch | DeviceLoraBatch) -> None:
        self._base, self._ops, self._batch = base, ops, batch
        self._in_features, self._dtype = layer.in_features, layer.dtype
        self._shelves: Iterable[Any] = ()

    @property
    def device(self) -> torch.device:
        """Where the weight lies."""
        return self._base.device

    def tensors(self, projection: Projection) -> Mapping[str, TensorSpec]:
        """What a checkpoint must hold for a projection, by name: `weight`, and `bias` or scales beside it."""
        return self._base.tensors(projection)

    def load(self, projection: Projection, name: str, value: torch.Tensor) -> None:
        """Takes one of these, whole, and keeps the rank's part of it."""
        self._base.load(projection, name, value)

    def tie(self, weight: torch.Tensor) -> None:
        """Takes the rank's part of another layer's weight [out, in] in place of one that is loaded."""
        self._base.tie(weight)

    def finish(self) -> None:
        """Brings the loaded weight into the form that `apply` wants."""
        self._base.finish()

    def shelve(self, slots: int, max_rank: int, parts: Sequence[tuple[int, int]]) -> Iterable[Shelf]:
        """Makes room for adapters of the layer's projections, each given by its first output and how many there are."""
        self._shelves = self._ops.lora_shelves(slots, max_rank, self._in_features, parts, self._dtype, self.device)
        return self._shelves

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in] → [n, out]; a row's result does not depend on the others."""
        y = self._base.apply(x)
        if self._shelves and self._batch.is_used:  # the LM head, whose rows are not the step's tokens, has no shelves
            self._ops.add_lora(y, x, self._shelves, self._batch)
        return y
