"""The last decisions, for people: what `/debug/decisions` shows."""

from collections import deque
from itertools import islice

import msgspec

from penstock.gateway.picker.candidates import Rejected
from penstock.gateway.picker.choice import Choice, Ranked
from penstock.gateway.picker.request import RequestView

KEPT = 256
REJECTED_SHOWN = 10


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
    prefilled_by: str | None
    """The replica that computes the prompt, if it is another one."""
    endpoints: list[str]
    prompt_tokens: int
    tokens_unknown: str | None
    waited_s: float
    """Seconds from the complete body to the decision: tokenization, and the time in a queue."""
    reasons: list[str]
    candidates: list[Scored]
    rejected: list[Rejected]


class _Kept(msgspec.Struct, frozen=True):
    """A decision as it was made; what people read is made of it when they do."""

    time: float
    request_id: str
    model: str
    waited_s: float
    choice: Choice

    def decision(self) -> Decision:
        choice, whole = self.choice, self.choice.whole
        return Decision(
            time=self.time,
            request_id=self.request_id,
            model=self.model,
            policy=choice.policy,
            picked=choice.replica.title,
            prefilled_by=None if choice.hop is None else choice.hop.replica.title,
            endpoints=choice.endpoints,
            prompt_tokens=whole.prompt_tokens,
            tokens_unknown=whole.tokens_unknown,
            waited_s=self.waited_s,
            reasons=choice.reasons,
            candidates=[_scored(entry) for entry in choice.ranked],
            rejected=choice.rejected[:REJECTED_SHOWN],
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
        report_age_s=candidate.report_age_s,
        booked_requests=candidate.booked.requests,
        booked_prefill_tokens=candidate.booked.prefill_tokens,
    )


class DecisionLog:
    """The last decisions of this process; no prompts in them."""

    def __init__(self) -> None:
        self._decisions: deque[_Kept] = deque(maxlen=KEPT)

    def add(self, request: RequestView, choice: Choice, waited_s: float, time: float) -> None:
        """Notes a pick made at Unix time `time`."""
        self._decisions.append(_Kept(time, request.id, request.model, waited_s, choice))

    def last(self, count: int, model: str | None = None, request_id: str | None = None) -> list[Decision]:
        """The newest `count` decisions, newest first; only those of a model (as clients call it) or a request where one is
        named."""
        found = (
            kept for kept in reversed(self._decisions) if model in (None, kept.model) and request_id in (None, kept.request_id)
        )
        return [kept.decision() for kept in islice(found, max(count, 0))]
