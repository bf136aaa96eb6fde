"""Policies: ways to rank replicas. `Cost` is the one to use; the others are the field's, for comparison.

Every policy is a function of the slate: randomness is drawn from the request's id and round robin's turn is part of it, so that
a decision can be repeated.
"""

from typing import Final, Protocol

import numpy as np

from penstock.gateway.picker.columns import PRIOR_ROWS
from penstock.gateway.picker.cost import cost_s, estimate
from penstock.gateway.picker.figures import Floats
from penstock.gateway.picker.slate import Slate


class Policy(Protocol):
    """Scores all rows of a slate; of those that may be picked the least score wins."""

    tolerance: float
    """Scores within this share of the best count as equal: such differences are noise, and following them herds."""

    def score(self, slate: Slate) -> Floats:
        """float64 [rows]; what it says of rows that may not be picked is ignored."""
        ...

    def terms(self, slate: Slate) -> dict[str, Floats]:
        """The figures behind the score, for people."""
        ...


def requests_at(slate: Slate) -> Floats:
    """Requests at each replica, booked ones included; where nothing is reported, one more than the others' average."""
    f = slate.figures
    reported = np.where(f.heard_at > -np.inf, f.running + f.waiting, slate.rates.requests + 1)
    return reported + f.booked_requests


class Cost:
    """The least estimated time, see `penstock.gateway.picker.cost`."""

    tolerance = 0.02

    def score(self, slate: Slate) -> Floats:
        """What is minimised: the time to the first token and what it costs others, by what its promises have been worth, and the
        time of `tokens` more."""
        return cost_s(slate)

    def terms(self, slate: Slate) -> dict[str, Floats]:
        """Those of the estimate."""
        cost = estimate(slate)
        ttft_s = cost.ttft_s
        correction_s = (slate.figures.correction - 1) * (ttft_s + cost.others_s)
        return {**cost._asdict(), "correction_s": correction_s, "ttft_s": ttft_s}


class Random:
    """Any replica."""

    tolerance = 0.0

    def score(self, slate: Slate) -> Floats:
        """A lot."""
        return slate.lots(np.arange(len(slate.open)))

    def terms(self, slate: Slate) -> dict[str, Floats]:
        """None."""
        return {}


class RoundRobin:
    """Each in turn, in the order of their names."""

    tolerance = 0.0

    def score(self, slate: Slate) -> Floats:
        """How many turns until it is this one's."""
        order = slate.by_name[slate.open[slate.by_name]]
        turns = np.zeros(len(slate.open))
        turns[order] = (np.arange(slate.candidates) - slate.turn) % slate.candidates
        return turns

    def terms(self, slate: Slate) -> dict[str, Floats]:
        """None."""
        return {}


class LeastRequest:
    """The fewest requests."""

    tolerance = 0.0

    def score(self, slate: Slate) -> Floats:
        """Requests at each."""
        return requests_at(slate)

    def terms(self, slate: Slate) -> dict[str, Floats]:
        """The same."""
        return {"requests": requests_at(slate)}


class PowerOfTwo:
    """The one with fewer requests of two random replicas; the others follow as fallbacks."""

    tolerance = 0.0

    def score(self, slate: Slate) -> Floats:
        """Requests at each, far more at those not drawn."""
        counts = requests_at(slate)
        among = np.flatnonzero(slate.open)
        drawn = among[np.argsort(slate.lots(among))[:2]]
        score = counts + (counts.max() + 1)
        score[drawn] = counts[drawn]
        return score

    def terms(self, slate: Slate) -> dict[str, Floats]:
        """Requests at each."""
        return {"requests": requests_at(slate)}


class WeightedScore:
    """The classic score α·prefix − β·queue − γ·kv (requirement RT-28), each term between 0 and 1: the resident share of the
    prompt, waiting requests as a share of the replica's rows, KV usage. The weights are the model's."""

    tolerance = 0.0

    def score(self, slate: Slate) -> Floats:
        """The score, negated."""
        terms, weights = self.terms(slate), slate.weights
        return weights.queue * terms["queue"] + weights.kv * terms["kv"] - weights.prefix * terms["prefix"]

    def terms(self, slate: Slate) -> dict[str, Floats]:
        """The three shares. Without a report: half full, which is neither no load nor a verdict."""
        f = slate.figures
        heard = f.heard_at > -np.inf
        rows = np.where(f.rows > 0, f.rows, PRIOR_ROWS)
        waiting = np.where(heard, f.waiting, rows / 2) + f.booked_requests
        return {
            "prefix": slate.resident / max(slate.request.prompt_tokens, 1),
            "queue": np.minimum(waiting / rows, 1.0),
            "kv": np.where(heard, f.kv_usage, 0.5),
        }


POLICIES: Final[dict[str, Policy]] = {
    "Cost": Cost(),
    "Random": Random(),
    "RoundRobin": RoundRobin(),
    "LeastRequest": LeastRequest(),
    "PowerOfTwo": PowerOfTwo(),
    "WeightedScore": WeightedScore(),
}
