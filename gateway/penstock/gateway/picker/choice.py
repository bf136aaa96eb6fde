"""The choice: one replica, an ordered list to fall back on, and reasons that a person can read."""

from collections.abc import Sequence
from itertools import islice

import msgspec

from penstock.gateway.picker.candidates import Candidate, Rejected
from penstock.gateway.picker.policies import POLICIES, Ranked, spread
from penstock.gateway.picker.request import RequestView

MAX_ENDPOINTS = 4
"""Length of the fallback list: the pick, and one for each retry of Envoy's route."""
NOISE = 0.001
"""Scores (seconds, for `Cost`) closer than this are equal where a policy tolerates differences at all."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes. `ranked` is in order of preference; its head is the pick."""

    policy: str
    ranked: list[Ranked]
    rejected: list[Rejected]
    limit: float
    """Scores up to here count as equal to the best."""
    prompt_tokens: int
    tokens_unknown: str | None
    """See `RequestView`, of which nothing else is kept: these go into the log of decisions, prompts do not."""

    @property
    def picked(self) -> Candidate:
        """The replica that the request goes to first."""
        return self.ranked[0].candidate

    @property
    def endpoints(self) -> list[str]:
        """The ordered list for Envoy: replicas of the pick's pool, since a list cannot cross clusters."""
        same_pool = (r.candidate.endpoint for r in self.ranked if r.candidate.pool == self.picked.pool)
        return list(islice(same_pool, MAX_ENDPOINTS))

    @property
    def reasons(self) -> list[str]:
        """Sentences for people, made when somebody asks: few picks are ever read."""
        pick = self.picked
        only = len(self.ranked) == 1
        reasons = [f"{pick.name} is the only candidate" if only else _comparison(self.ranked[0], self.ranked[1], self.limit)]
        if self.tokens_unknown is not None:
            reasons.append(f"chosen without residency: {self.tokens_unknown}")
        elif pick.resident_tokens:
            reasons.append(f"{pick.resident_tokens} of {self.prompt_tokens} prompt tokens are resident at {pick.name}")
        else:
            reasons.append(f"none of the {self.prompt_tokens} prompt tokens is resident at {pick.name}")
        if pick.report is None:
            reasons.append(f"{pick.name} has not reported its load yet; assumed average")
        else:
            reasons.append(
                f"{pick.name} reported {pick.report.num_requests_running} running and {pick.report.waiting} waiting"
                f" {pick.report_age_s:.1f} s ago; {pick.booked.requests} more on their way"
            )
        if pick.suspect:
            reasons.append("every candidate has recently failed to answer; the best of them")
        return reasons


def choose(request: RequestView, candidates: Sequence[Candidate], rejected: Sequence[Rejected], policy: str, turn: int) -> Choice:
    """Ranks `candidates` by `policy`.

    Args:
        request: The request.
        candidates: At least one; all of them may be picked.
        rejected: Those that may not, for the record.
        policy: A name in `POLICIES`; any other is a ValueError.
        turn: Number of the pick among those of the model.
    """
    if policy not in POLICIES:
        raise ValueError(f"routing policy {policy!r} does not exist; there are {', '.join(POLICIES)}")
    rule = POLICIES[policy]
    ranked = rule.rank(request, candidates, turn)
    last_resort = all(candidate.suspect for candidate in candidates)
    best = min(entry.score for entry in ranked if entry.candidate.suspect == last_resort)
    limit = best + max(NOISE, abs(best) * rule.tolerance) if rule.tolerance else best

    def order(entry: Ranked) -> tuple[object, ...]:
        candidate = entry.candidate
        tie = spread(request.id, candidate)
        if entry.score <= limit:  # as good as the best: less on its way, then more of the prompt in its cache, then by lot
            return (candidate.suspect, 0, candidate.booked.requests, -candidate.resident_tokens, tie)
        return (candidate.suspect, 1, entry.score, tie)

    ranked.sort(key=order)
    return Choice(
        policy=policy,
        ranked=ranked,
        rejected=list(rejected),
        limit=limit,
        prompt_tokens=request.prompt_tokens,
        tokens_unknown=request.tokens_unknown,
    )


def _comparison(first: Ranked, second: Ranked, limit: float) -> str:
    """One sentence on why `first` comes before `second`: a tie and what broke it, or the term that differs most."""
    one, other = first.candidate, second.candidate
    a, b = one.name, other.name
    if one.suspect != other.suspect:
        return f"{a} before {b}, which has recently failed to answer"
    scores = f"{a} ({first.score:.4g}) before {b} ({second.score:.4g})"
    if second.score <= limit:
        if one.booked.requests != other.booked.requests:
            return f"{scores}: as good as equal, and {a} has fewer requests on their way"
        if one.resident_tokens != other.resident_tokens:
            return f"{scores}: as good as equal, and {a} holds more of the prompt"
        return f"{scores}: as good as equal, by lot"
    mine, others = first.terms, second.terms
    differences = {name: others[name] - value for name, value in mine.items() if name != "ttft_s"}
    name = max(differences, key=lambda term: abs(differences[term]), default="")
    if not name or not differences[name]:
        return scores
    return f"{scores}, mostly by {name}: {mine[name]:.4g} against {others[name]:.4g}"
