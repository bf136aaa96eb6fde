"""Policies: ways to rank candidates. `Cost` is the one to use; the others are the field's, for comparison.

Every policy is a function of its arguments: randomness is drawn from the request's id and round robin's turn is an argument, so
that a decision can be repeated.
"""

import hashlib
from collections.abc import Sequence
from statistics import fmean
from typing import Final, Protocol

import msgspec

from penstock.gateway.picker.candidates import Candidate
from penstock.gateway.picker.cost import Estimate, common_rates, estimate
from penstock.gateway.picker.request import RequestView


class Ranked(msgspec.Struct, frozen=True):
    """A candidate with what a policy makes of it: the least `score` wins."""

    candidate: Candidate
    score: float
    basis: Estimate | dict[str, float] = {}

    @property
    def terms(self) -> dict[str, float]:
        """The figures behind the score, for people."""
        if isinstance(self.basis, Estimate):
            return {**msgspec.structs.asdict(self.basis), "ttft_s": self.basis.ttft_s}
        return self.basis


class Policy(Protocol):
    """Scores all candidates of one pick, in their order."""

    tolerance: float
    """Scores within this share of the best count as equal: such differences are noise, and following them herds."""

    def rank(self, request: RequestView, candidates: Sequence[Candidate], turn: int) -> list[Ranked]:
        """One `Ranked` a candidate; `turn` rises by one with every pick of the model."""
        ...


def spread(request_id: str, candidate: Candidate) -> float:
    """A number in [0, 1) that differs by request and replica: rendezvous hashing, so that ties spread and yet repeat."""
    digest = hashlib.blake2b(f"{request_id}/{candidate.key.uid}/{candidate.key.port}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") / 2**56


def requests_at(candidates: Sequence[Candidate]) -> list[float]:
    """Requests at each candidate, booked ones included; where nothing is reported, one more than the others' average."""
    known = [c.report.num_requests_running + c.report.waiting for c in candidates if c.report is not None]
    unknown = (fmean(known) if known else 0.0) + 1
    return [
        (c.report.num_requests_running + c.report.waiting if c.report is not None else unknown) + c.booked.requests
        for c in candidates
    ]


class Cost:
    """The least estimated time, see `penstock.gateway.picker.cost`."""

    tolerance = 0.02

    def rank(self, request: RequestView, candidates: Sequence[Candidate], turn: int) -> list[Ranked]:
        rates = common_rates(candidates)
        ranked: list[Ranked] = []
        for candidate in candidates:
            cost = estimate(request, candidate, rates)
            ranked.append(Ranked(candidate, cost.cost_s(request.max_tokens), cost))
        return ranked


class Random:
    """Any replica."""

    tolerance = 0.0

    def rank(self, request: RequestView, candidates: Sequence[Candidate], turn: int) -> list[Ranked]:
        return [Ranked(candidate, spread(request.id, candidate)) for candidate in candidates]


class RoundRobin:
    """Each in turn, in the order of their names."""

    tolerance = 0.0

    def rank(self, request: RequestView, candidates: Sequence[Candidate], turn: int) -> list[Ranked]:
        order = {candidate.key: at for at, candidate in enumerate(sorted(candidates, key=lambda c: (c.name, c.key)))}
        return [Ranked(candidate, (order[candidate.key] - turn) % len(candidates)) for candidate in candidates]


class LeastRequest:
    """The fewest requests."""

    tolerance = 0.0

    def rank(self, request: RequestView, candidates: Sequence[Candidate], turn: int) -> list[Ranked]:
        counts = requests_at(candidates)
        return [Ranked(c, count, {"requests": count}) for c, count in zip(candidates, counts, strict=True)]


class PowerOfTwo:
    """The one with fewer requests of two random replicas; the others follow as fallbacks."""

    tolerance = 0.0

    def rank(self, request: RequestView, candidates: Sequence[Candidate], turn: int) -> list[Ranked]:
        counts = requests_at(candidates)
        drawn = {c.key for c in sorted(candidates, key=lambda c: spread(request.id, c))[:2]}
        behind = max(counts) + 1
        return [
            Ranked(c, count if c.key in drawn else behind + count, {"requests": count})
            for c, count in zip(candidates, counts, strict=True)
        ]


class WeightedScore:
    """The classic score α·prefix − β·queue − γ·kv (requirement RT-28), each term between 0 and 1.

    Args:
        prefix: α, weight of the resident share of the prompt.
        queue: β, weight of waiting requests as a share of the replica's rows.
        kv: γ, weight of KV usage.
    """

    tolerance = 0.0

    def __init__(self, prefix: float = 3.0, queue: float = 2.0, kv: float = 2.0) -> None:
        self.prefix, self.queue, self.kv = prefix, queue, kv

    def rank(self, request: RequestView, candidates: Sequence[Candidate], turn: int) -> list[Ranked]:
        return [self._ranked(request, candidate) for candidate in candidates]

    def _ranked(self, request: RequestView, candidate: Candidate) -> Ranked:
        report, booked = candidate.report, candidate.booked.requests
        prefix = candidate.resident_tokens / max(request.prompt_tokens, 1)
        # Without a report: half full, which is neither no load nor a verdict.
        rows = (report.max_num_seqs if report else 0) or 256
        queue = min(((report.waiting if report else rows / 2) + booked) / rows, 1.0)
        usage = report.kv_cache_usage_perc if report else 0.5
        score = -(self.prefix * prefix - self.queue * queue - self.kv * usage)
        return Ranked(candidate, score, {"prefix": prefix, "queue": queue, "kv": usage})


POLICIES: Final[dict[str, Policy]] = {
    "Cost": Cost(),
    "Random": Random(),
    "RoundRobin": RoundRobin(),
    "LeastRequest": LeastRequest(),
    "PowerOfTwo": PowerOfTwo(),
    "WeightedScore": WeightedScore(),
}
