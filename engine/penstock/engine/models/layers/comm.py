"""How the ranks of a tensor-parallel group add up and join what each has computed."""

from typing import Protocol

import torch


class Comm(Protocol):
    """One rank's connection to its group. All ranks make the same calls in the same order."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, added in the order of ranks, on all ranks. May overwrite `x`."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, k] of each rank → [n, ranks · k], in the order of ranks, on all ranks."""
        ...

    def agree(self, value: float) -> float:
        """Rank 0's value, on all ranks: what they measure themselves is not the same."""
        ...

    def check(self) -> None:
        """Raises `GroupFailed` where what a tape has replayed went wrong; other calls raise it by themselves."""
        ...


class OneRank:
    """A group of one: nothing is exchanged."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's `x`, added in the order of ranks, on all ranks."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, k] of each rank → [n, ranks · k], in the order of ranks, on all ranks."""
        return x

    def agree(self, value: float) -> float:
        """Rank 0's value, on all ranks: what they measure themselves is not the same."""
        return value

    def check(self) -> None:
        """Nothing can go wrong."""
