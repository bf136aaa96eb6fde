"""The last decisions, for people: what `/debug/decisions` shows."""

from collections import deque

import msgspec

from penstock.gateway.picker.candidates import Rejected
from penstock.gateway.picker.choice import Choice
from penstock.gateway.picker.policies import Ranked
from penstock.gateway.picker.request import RequestView

KEPT = 256
CANDIDATES_KEPT = 10


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate of a decision."""

    name: str
    pool: str
    endpoint: str
    score: float
    terms: dict[str, float]
    resident_tokens: int
    report_age_s: float | None
    booked_requests: int
    booked_prefill_tokens: int


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One pick; `candidates` in order of preference."""

    time: float
    """Unix time in seconds."""
    request_id: str
    model: str
    policy: str
    picked: str
    endpoints: list[str]
    prompt_tokens: int
    tokens_unknown: str | None
    waited_s: float
    """From the complete body to the decision: tokenising, and holding where there was no replica."""
    reasons: list[str]
    candidates: list[Scored]
    rejected: list[Rejected]


class _Kept(msgspec.Struct, frozen=True):
    """A decision as it was made; what people read is made of it when they do."""

    time: float
    request_id: str
    model: str
    waited_s: float
    endpoints: list[str]
    choice: Choice

    def decision(self) -> Decision:
        choice = self.choice
        return Decision(
            time=self.time,
            request_id=self.request_id,
            model=self.model,
            policy=choice.policy,
            picked=choice.picked.name,
            endpoints=self.endpoints,
            prompt_tokens=choice.prompt_tokens,
            tokens_unknown=choice.tokens_unknown,
            waited_s=self.waited_s,
            reasons=choice.reasons,
            candidates=[_scored(entry) for entry in choice.ranked],
            rejected=choice.rejected,
        )


def _scored(entry: Ranked) -> Scored:
    candidate = entry.candidate
    return Scored(
        name=candidate.name,
        pool=candidate.pool,
        endpoint=candidate.endpoint,
        score=entry.score,
        terms=entry.terms,
        resident_tokens=candidate.resident_tokens,
        report_age_s=candidate.report_age_s if candidate.report else None,
        booked_requests=candidate.booked.requests,
        booked_prefill_tokens=candidate.booked.prefill_tokens,
    )


class DecisionLog:
    """The last decisions of this process; no prompts in them."""

    def __init__(self) -> None:
        self._decisions: deque[_Kept] = deque(maxlen=KEPT)

    def add(self, request: RequestView, choice: Choice, waited_s: float, time: float) -> None:
        """Notes a pick made at Unix time `time`."""
        endpoints = choice.endpoints
        if len(choice.ranked) > CANDIDATES_KEPT or len(choice.rejected) > CANDIDATES_KEPT:
            ranked, rejected = choice.ranked[:CANDIDATES_KEPT], choice.rejected[:CANDIDATES_KEPT]
            choice = msgspec.structs.replace(choice, ranked=ranked, rejected=rejected)
        self._decisions.append(_Kept(time, request.id, request.model, waited_s, endpoints, choice))

    def last(self, count: int) -> list[Decision]:
        """The newest `count` decisions, newest first."""
        return [kept.decision() for kept in list(self._decisions)[::-1][: max(count, 0)]]
