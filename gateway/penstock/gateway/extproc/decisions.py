"""The last decisions, for people: what `/debug/decisions` shows."""

from collections import deque
from itertools import islice

import msgspec

from penstock.gateway.picker.candidates import Rejected
from penstock.gateway.picker.choice import Ranked
from penstock.gateway.picker.request import RequestView
from penstock.gateway.picker.usual import Made, told

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


_Kept = tuple[float, str, str, float, Made]
"""A decision as it was made: Unix time, the request's id and model, how long it had waited, the choice."""


def _decision(time: float, request_id: str, model: str, waited_s: float, made: Made) -> Decision:
    """What people read of a decision."""
    choice = told(made)
    return Decision(
        time=time,
        request_id=request_id,
        model=model,
        policy=choice.policy,
        picked=choice.replica.title,
        prefilled_by=None if choice.hop is None else choice.hop.replica.title,
        endpoints=choice.endpoints,
        prompt_tokens=choice.whole.request.prompt_tokens,
        tokens_unknown=choice.whole.request.tokens_unknown,
        waited_s=waited_s,
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

    def add(self, request: RequestView, choice: Made, waited_s: float, time: float) -> None:
        """Notes a pick made at Unix time `time`."""
        self._decisions.append((time, request.id, request.model, waited_s, choice))

    def last(self, count: int, model: str | None = None, request_id: str | None = None) -> list[Decision]:
        """The newest `count` decisions, newest first; only those of a model (as clients call it) or a request where one is
        named."""
        newest = reversed(self._decisions)
        found = (kept for kept in newest if request_id in (None, kept[1]) and model in (None, kept[2]))
        return [_decision(*kept) for kept in islice(found, max(count, 0))]
