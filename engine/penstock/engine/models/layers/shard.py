"""Which part of a weight a rank of a tensor-parallel group holds."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shard:
    """One rank among `world`."""

    rank: int = 0
    world: int = 1

    def size(self, total: int, what: str) -> int:
        """The rank's part of `total`; ValueError, naming `what`, where it does not divide evenly."""
        if total % self.world:
            raise ValueError(f"{what} {total} cannot be divided among {self.world} ranks")
        return total // self.world

    def narrow(self, weight: torch.Tensor, dim: int) -> torch.Tensor:
        """The rank's slice along a dimension."""
        size = weight.shape[dim] // self.world
        return weight.narrow(dim, self.rank * size, size)
