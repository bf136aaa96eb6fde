"""The last decisions, for people: what `/debug/decisions` shows."""

from collections import deque

import msgspec

from penstock.gateway.picker.candidates import Rejected
from penstock.gateway.picker.choice import Choice
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


class DecisionLog:
    """The last decisions of this process; no prompts in them."""

    def __init__(self) -> None:
        self._decisions: deque[Decision] = deque(maxlen=KEPT)

    def add(self, request: RequestView, choice: Choice, waited_s: float, time: float) -> None:
        """Notes a pick made at Unix time `time`."""
        self._decisions.append(
            Decision(
                time=time,
                request_id=request.id,
                model=request.model,
                policy=choice.policy,
                picked=choice.picked.name,
                endpoints=choice.endpoints,
                prompt_tokens=request.prompt_tokens,
                tokens_unknown=request.tokens_unknown,
                waited_s=waited_s,
                reasons=choice.reasons,
                candidates=[
                    Scored(
                        name=entry.candidate.name,
                        pool=entry.candidate.pool,
                        endpoint=entry.candidate.endpoint,
                        score=entry.score,
                        terms=entry.terms,
                        resident_tokens=entry.candidate.resident_tokens,
                        report_age_s=entry.candidate.report_age_s if entry.candidate.report else None,
                        booked_requests=entry.candidate.booked.requests,
                        booked_prefill_tokens=entry.candidate.booked.prefill_tokens,
                    )
                    for entry in choice.ranked[:CANDIDATES_KEPT]
                ],
                rejected=choice.rejected[:CANDIDATES_KEPT],
            )
        )

    def last(self, count: int) -> list[Decision]:
        """The newest `count` decisions, newest first."""
        return list(self._decisions)[::-1][: max(count, 0)]
