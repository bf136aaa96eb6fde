"""What a layer of experts that lie on several ranks and what joins these ranks ask of each other."""

from typing import Protocol

import torch

from penstock.engine.models.layers.placement import Placement


class ExpertLayer(Protocol):
    """A layer's experts on one rank."""

    placement: Placement
    hidden_size: int
    top_k: int
    dtype: torch.dtype

    def held(self, slot: int, /) -> list[torch.Tensor]:
        """The tensors of one of the rank's own slots, alike in all of them; ConfigError where they cannot move."""
        ...

    def place(self, placement: Placement, /) -> None:
        """Serves experts where they now are, in memory that may be another."""
        ...

    def rows(self, x: torch.Tensor, slots: torch.Tensor, /) -> torch.Tensor:
        """[m, hidden] and, of each row, one of the rank's own slots, [m] int32 → [m, hidden]."""
        ...

    def combine(self, results: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, /) -> torch.Tensor:
        """The sum of each token's results by weight, in the order of its choices; see `experts.reference.combine_rows`."""
        ...


class ExpertRanks(Protocol):
    """One rank's way to the experts on all ranks."""

    @property
    def rank(self) -> int:
        """This process's, among all that have experts."""
        ...

    def placed(self, experts: int) -> Placement:
        """Where so many experts of a layer are to begin with."""
        ...

    def run(self, layer: ExpertLayer, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, /) -> torch.Tensor:
        """[n, hidden] of the rank's core, and each token's experts and weights, [n, k] → [n, hidden]: the whole sums."""
        ...
