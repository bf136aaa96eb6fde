"""Which part of a weight a rank of a tensor-parallel group holds. Light to import: refusals need the arithmetic alone."""

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Span(NamedTuple):
    """The part of `total` features that one rank holds."""

    total: int
    start: int
    size: int
    """Features of the rank. Those at `total` and beyond are padding."""

    @property
    def stop(self) -> int:
        """The end of the features that exist."""
        return min(self.start + self.size, self.total)

    def times(self, count: int) -> "Span":
        """The same part where every feature becomes `count`: heads become their elements."""
        return Span(self.total * count, self.start * count, self.size * count)

    def narrow(self, value: "torch.Tensor", dim: int) -> "torch.Tensor":
        """The rank's slice along a dimension of `total` entries; padding is zero."""
        first = min(self.start, self.total)
        part = value.narrow(dim, first, max(self.stop - first, 0))
        if part.shape[dim] == self.size:
            return part
        padded = value.new_zeros(*value.shape[:dim], self.size, *value.shape[dim + 1 :])
        padded.narrow(dim, 0, part.shape[dim]).copy_(part)
        return padded


@dataclass(frozen=True)
class Shard:
    """One rank among `world`."""

    rank: int = 0
    world: int = 1

    def span(self, total: int, what: str) -> Span:
        """The rank's part of `total`; ValueError, naming `what`, where it does not divide evenly."""
        if total % self.world:
            raise ValueError(f"{what} {total} cannot be divided among {self.world} ranks")
        size = total // self.world
        return Span(total, self.rank * size, size)

    def padded(self, total: int) -> Span:
        """The rank's part of `total`, rounded up to a multiple of the ranks."""
        size = -(-total // self.world)
        return Span(total, self.rank * size, size)

    def replicas(self, heads: int) -> int:
        """How many ranks hold the same KV head: more than one where there are more ranks than heads."""
        return max(self.world // heads, 1)

    def kv_heads(self, heads: int) -> Span:
        """The rank's KV heads. Neighbouring ranks share one where there are fewer heads than ranks; ValueError where that does
        not work out."""
        replicas = self.replicas(heads)
        if replicas * heads == self.world:
            return Span(heads, self.rank // replicas, 1)
        if self.world > heads:
            raise ValueError(f"num_key_value_heads {heads}: {self.world} ranks are no multiple of them")
        return self.span(heads, "num_key_value_heads")


@dataclass(frozen=True)
class Stage:
    """One pipeline stage among `world`: which layers it runs."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether it begins with tokens."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """Whether it ends with logits."""
        return self.rank == self.world - 1

    def layers(self, sizes: Sequence[float]) -> range:
        """The stage's layers: a pipeline is as slow as its largest stage, which is as small as can be.

        Args:
            sizes: Of every layer of the model, in any unit.

        Raises:
            ValueError: There are fewer layers than stages.
        """
        if len(sizes) < self.world:
            raise ValueError(f"num_hidden_layers {len(sizes)} cannot be divided among {self.world} pipeline stages")
        return divided(sizes, self.world)[self.rank]


def divided(sizes: Sequence[float], parts: int) -> list[range]:
    """Consecutive parts of a list, none empty. The largest is as small as can be, and the others are as even as that allows."""
    sums = [0.0, *itertools.accumulate(sizes)]
    largest = _least(sums, parts, max, lambda size: size)[0]
    _, ends = _least(sums, parts, operator.add, lambda size: size * size if size <= largest else math.inf)
    return [range(start, end) for start, end in itertools.pairwise((0, *ends))]


def _least(
    sums: list[float], parts: int, joined: Callable[[float, float], float], cost: Callable[[float], float]
) -> tuple[float, tuple[int, ...]]:
    """The least joined cost of consecutive parts of a list, and where they end; `sums` are those of the list's beginnings."""
    total = len(sums) - 1
    best = [(cost(sums[end]), (end,)) for end in range(1, total + 1)]  # [i]: of the first i + part entries
    for part in range(2, parts + 1):
        best = [
            min(
                (joined(best[before - part + 1][0], cost(sums[end] - sums[before])), (*best[before - part + 1][1], end))
                for before in range(part - 1, end)
            )
            for end in range(part, total + 1)
        ]
    return best[-1]
