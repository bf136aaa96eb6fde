"""What was seen of a model's requests in some time. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest

from penstock.api.fleet import LATENCY_EDGES_S, ModelOutcomes

_EDGES = (0.0, *LATENCY_EDGES_S, 2 * LATENCY_EDGES_S[-1])


@dataclass(frozen=True)
class Tally:
    """Counts of one model's requests."""

    requests: int = 0
    failures: int = 0
    ttft: tuple[int, ...] = ()
    """First tokens by time, one number for each of `LATENCY_EDGES_S` and one for all later ones; empty where there were none."""

    @property
    def first_tokens(self) -> int:
        """How many were seen."""
        return sum(self.ttft)

    @property
    def failed_share(self) -> float:
        """Share of requests that failed, 0 to 1."""
        return self.failures / self.requests if self.requests else 0.0

    def __add__(self, other: "Tally") -> "Tally":
        ttft = tuple(a + b for a, b in zip_longest(self.ttft, other.ttft, fillvalue=0))
        return Tally(self.requests + other.requests, self.failures + other.failures, ttft)

    def since(self, before: "Tally") -> "Tally":
        """Return the counts since `before`, or all counts after a restart of the counter."""
        ttft = tuple(a - b for a, b in zip_longest(self.ttft, before.ttft, fillvalue=0))
        grown = Tally(self.requests - before.requests, self.failures - before.failures, ttft)
        return self if min(grown.requests, grown.failures, *ttft, 0) < 0 else grown

    def ttft_s(self, share: float) -> float:
        """The time within which this share of the first tokens came, evenly spread within their buckets; there must be some."""
        wanted, reached = share * self.first_tokens, 0.0
        for count, (low, high) in zip(self.ttft, pairwise(_EDGES), strict=True):
            if count and reached + count >= wanted:
                return low + (high - low) * (wanted - reached) / count
            reached += count
        return _EDGES[-1]

    def later_than(self, seconds: float) -> float:
        """The share of first tokens that took longer; there must be some."""
        if seconds >= _EDGES[-1]:
            return 0.0
        for reached, count, (low, high) in zip(accumulate(self.ttft, initial=0), self.ttft, pairwise(_EDGES), strict=False):
            if seconds < high:
                return 1 - (reached + count * (seconds - low) / (high - low)) / self.first_tokens
        raise AssertionError("the buckets reach further")


def tally(outcomes: ModelOutcomes) -> Tally:
    """What a gateway has counted."""
    return Tally(outcomes.requests, outcomes.failures, _whole(outcomes.ttft_counts))


def _whole(counts: Sequence[int]) -> tuple[int, ...]:
    """Counts by edges that are not ours say nothing."""
    return tuple(counts) if len(counts) == len(LATENCY_EDGES_S) + 1 else ()
