"""The choice of a replica, its booking, and the record of the decision."""

import time
from collections.abc import Mapping
from typing import Any

import orjson

from penstock.api import headers
from penstock.gateway.extproc.call import Refused, Routed
from penstock.gateway.extproc.decisions import DecisionLog
from penstock.gateway.extproc.passage import MOST_ANSWERS, Passage
from penstock.gateway.extproc.underway import Underway
from penstock.gateway.http.metrics import PickerMetrics
from penstock.gateway.picker.request import RequestView
from penstock.gateway.picker.state import FleetState
from penstock.gateway.picker.usual import Made, told
from penstock.prompt.processor import EMBEDDINGS_PATH

EXPLAIN = "explain"
SUBSET_RETRY_S = 1
"""Seconds until a retry: the picker does not learn when a gateway's subset changes."""


class Pick:
    """The last stage."""

    def __init__(self, state: FleetState, underway: Underway, decisions: DecisionLog, metrics: PickerMetrics) -> None:
        self._state = state
        self._underway = underway
        self._decisions = decisions
        self._metrics = metrics

    def run(self, passage: Passage) -> Routed | None:
        """Pick and book a replica. Return None if none is ready any more.

        Raises:
            Refused: with 503, if no replica is in the gateway's subset.
        """
        call, model, tokens, state = passage.call, passage.model, passage.tokens, self._state
        decided = time.monotonic()
        request = _view(passage)
        body, finishes = _renamed(passage), passage.finishes
        sent = state.send(model, request, decided, subset=passage.subset, comparable=tokens.comparable, answers=finishes)
        if sent is None:
            if passage.subset is not None:
                which = "" if passage.adapter is None else f" with adapter {passage.adapter!r}"
                message = f"model {model.name!r} has no ready replica{which} that the gateway allows; try again later"
                raise Refused(503, message, "no_ready_replica", retry_after_s=SUBSET_RETRY_S)
            return None
        choice, booking, prefill_booking = sent
        name = self._underway.name() if call.inference_pool is None else None
        explanation = _one_line(choice) if call.headers.get(headers.DECISION) == EXPLAIN else None
        routed = Routed(
            endpoints=choice.endpoints,
            pool=choice.replica.pool if call.inference_pool is None else None,
            booking=booking,
            model=model.id,
            name=passage.name,
            came=passage.came,
            tenant=passage.tenant.name,
            adapter=passage.adapter,
            choice=choice,
            prompt_tokens=request.prompt_tokens,
            decided=decided,
            finishes=finishes,
            prefill_booking=prefill_booking,
            explanation=explanation,
            request_id=None if call.headers.get(headers.REQUEST_ID) else request.id,
            named=name,
            sets=_for_the_replica(passage, booking.key.rank, decided),
            removes=("authorization", *headers.API_KEYS) if passage.conceals else (),
            body=body,
        )
        self.note(request, choice, routed)
        return routed

    def note(self, request: RequestView, choice: Made, routed: Routed) -> None:
        """Record a request that was just picked for."""
        self._decisions.add(request, choice, routed.decided - routed.came, time.time())
        self._metrics.picked(choice.replica.pool, choice.policy, time.monotonic() - routed.decided)
        if routed.named is not None:
            self._underway.add(routed.named, routed)


def on_rank(rank: int | None) -> list[tuple[str, str]]:
    """Return the header that tells the replica its data-parallel rank, if it has one."""
    return [] if rank is None else [(headers.DATA_PARALLEL_RANK, str(rank))]


def _for_the_replica(passage: Passage, rank: int | None, now: float) -> list[tuple[str, str]]:
    """Return the headers that tell the replica its data-parallel rank, the tenant and the rest of the client's time limit."""
    sets = on_rank(rank)
    if passage.tenant.name:
        sets += [(headers.TENANT, passage.tenant.name), (headers.PRIORITY, str(passage.priority))]
    if passage.charged and passage.patience_s is not None:
        left_s = passage.came + passage.patience_s - now
        sets.append((headers.TIMEOUT, str(max(int(left_s * 1000), 1))))
    return sets


def _renamed(passage: Passage) -> bytes | None:
    """The body with the name that the engines know; None where the client's is one. Raises `Refused` with 400."""
    if passage.renamed is None:
        return None
    try:
        return orjson.dumps({**passage.body.fields, "model": passage.renamed})
    except orjson.JSONEncodeError:  # it reads four times as deep as it writes
        raise Refused(400, "the body has lists or objects in one another too deep", "invalid_body") from None


def _view(passage: Passage) -> RequestView:
    body, tokens, path = passage.body, passage.tokens, passage.path
    return RequestView(
        id=passage.request_id,
        path=path,
        model=body.model,
        adapter=passage.adapter,
        prompts=tokens.prompts,
        block_size=tokens.block_size,
        elsewhere=tokens.elsewhere,
        tokens_unknown=tokens.unknown,
        max_tokens=0 if path == EMBEDDINGS_PATH else body.max_tokens,
        answers=_answers(body.fields),
    )


def _answers(fields: Mapping[str, Any]) -> int:
    """How many the engine makes of each prompt, as far as that is a number; the engine is the judge of it."""
    if "n" not in fields and "best_of" not in fields:
        return 1
    counts = [count for name in ("n", "best_of") if isinstance(count := fields.get(name), int)]
    return min(max(counts), MOST_ANSWERS) if counts else 1


def _one_line(choice: Made) -> str:
    """The reasons as the value of a header."""
    return "; ".join(told(choice).reasons).encode("ascii", "replace").decode().replace("\n", " ")
