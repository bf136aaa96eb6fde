"""Decides what becomes of each request: reads it, finds its model, holds it while there is nobody, picks, books."""

import logging
import time
import uuid
from urllib.parse import unquote

import orjson

from penstock.api import headers, load_report
from penstock.api.fleet import Model
from penstock.api.load_report import LoadReport, LoadReportError
from penstock.gateway.extproc.body import Body, parse_body
from penstock.gateway.extproc.call import Answered, Call, Refused, ResponseHead, Routed
from penstock.gateway.extproc.decisions import DecisionLog
from penstock.gateway.extproc.holding import HoldingArea, no_ready_replica
from penstock.gateway.http.metrics import PickerMetrics
from penstock.gateway.load.prompts import PromptLibrary
from penstock.gateway.picker.bookings import State
from penstock.gateway.picker.candidates import Candidate, Rejected
from penstock.gateway.picker.choice import Choice, choose
from penstock.gateway.picker.policies import POLICIES
from penstock.gateway.picker.request import RequestView
from penstock.gateway.picker.state import FleetState
from penstock.prompt.processor import PROMPT_PATHS

MODELS_PATH = "/v1/models"
_METHODS = dict.fromkeys(PROMPT_PATHS, "POST") | {MODELS_PATH: "GET"}
EXPLAIN = "explain"
_UNAVAILABLE = ("502", "503", "504")

log = logging.getLogger(__name__)


class PickDirector:
    """See `penstock.gateway.extproc.exchange.Director`."""

    def __init__(
        self, state: FleetState, prompts: PromptLibrary, holding: HoldingArea, decisions: DecisionLog, metrics: PickerMetrics
    ) -> None:
        self._state = state
        self._prompts = prompts
        self._holding = holding
        self._decisions = decisions
        self._metrics = metrics

    def preview(self, call: Call) -> None:
        """Refuses paths that do not exist, and bodies that cannot be read, before the bodies have come."""
        method = "GET" if call.path.startswith(f"{MODELS_PATH}/") else _METHODS.get(call.path)
        if method is None:
            message = f"{call.path} does not exist here; there are {', '.join(_METHODS)}"
            raise self._counted(Refused(404, message, "unknown_path"))
        if call.method != method:
            message = f"{call.path} takes {method}, not {call.method}"
            raise self._counted(Refused(405, message, "method_not_allowed"))
        encoding = call.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            message = f"content-encoding {encoding} is not supported: send the body as it is"
            raise self._counted(Refused(415, message, "unsupported_encoding", param="content-encoding"))

    async def route(self, call: Call) -> Routed | Answered:
        """See `Director`."""
        try:
            if call.path == MODELS_PATH:
                return _json({"object": "list", "data": [_entry(*item) for item in self._state.served_names.items()]})
            if call.path.startswith(f"{MODELS_PATH}/"):
                name = unquote(call.path.removeprefix(f"{MODELS_PATH}/"))
                return _json(_entry(name, self._model(name)))
            return await self._pick(call)
        except Refused as refused:
            raise self._counted(refused) from None

    async def _pick(self, call: Call) -> Routed:
        body = parse_body(call.body)
        came = time.monotonic()
        request_id = call.headers.get(headers.REQUEST_ID) or uuid.uuid4().hex
        model, request, candidates, rejected = await self._candidates(call, body, request_id)
        decided = time.monotonic()
        choice = choose(request, candidates, rejected, model.policy, self._state.turn(model))
        picked = choice.picked
        fresh = request.prompt_tokens - picked.resident_tokens
        booking = self._state.bookings.book(request.id, picked.key, fresh, decided)
        self._decisions.add(request, choice, decided - came, time.time())
        self._metrics.picks.labels(pool=picked.pool, policy=choice.policy).inc()
        self._metrics.pick_seconds.observe(time.monotonic() - decided)
        explain = call.headers.get(headers.DECISION) == EXPLAIN
        return Routed(
            endpoints=choice.endpoints,
            pool=picked.pool,
            booking=booking,
            explanation=_one_line(choice) if explain else None,
            request_id=None if call.headers.get(headers.REQUEST_ID) else request_id,
        )

    def _model(self, name: str) -> Model:
        """The model that serves `name`; raises `Refused` with 404 where there is none."""
        model = self._state.model(name)
        if model is None:
            names = ", ".join(sorted(self._state.served_names)) or "none yet"
            raise Refused(404, f"model {name!r} does not exist; there are: {names}", "model_not_found", param="model")
        if model.policy not in POLICIES:
            raise Refused(503, f"model {name!r} asks for an unknown routing policy, {model.policy!r}", "unknown_policy")
        return model

    async def _candidates(
        self, call: Call, body: Body, request_id: str
    ) -> tuple[Model, RequestView, list[Candidate], list[Rejected]]:
        """The model, the request with its tokens, and those that may take it; waits while there is nobody."""
        model = self._model(body.model)
        deadline = time.monotonic() + model.hold_timeout_s
        while True:
            if not self._anybody(model) and call.subset is None:
                async with self._holding.hold(model, len(call.body)):
                    while not self._anybody(model):
                        await self._holding.changed(model, deadline)
                        model = self._model(body.model)  # which may be gone, or be another's name by now
            request, candidates, rejected = await self._look(call, body, model, request_id)
            if candidates:
                return model, request, candidates, rejected
            if call.subset is not None:
                raise no_ready_replica(model, "that the gateway allows")

    def _anybody(self, model: Model) -> bool:
        return any(r.ready and not r.terminating and not r.cordoned for r in self._state.replicas_of(model))

    async def _look(
        self, call: Call, body: Body, model: Model, request_id: str
    ) -> tuple[RequestView, list[Candidate], list[Rejected]]:
        replicas = self._state.replicas_of(model)
        tokenized = await self._prompts.tokenize(replicas, call.path, call.body, body.fields)
        request = RequestView(
            id=request_id,
            path=call.path,
            model=body.model,
            prompts=tokenized.prompts,
            block_size=tokenized.block_size,
            tokens_unknown=tokenized.unknown,
            max_tokens=body.max_tokens,
            stream=body.stream,
        )
        candidates, rejected = self._state.candidates(
            model, request, time.monotonic(), subset=call.subset, comparable=tokenized.comparable
        )
        return request, candidates, rejected

    def responded(self, routed: Routed, head: ResponseHead) -> list[tuple[str, str]]:
        """See `Director`."""
        now, state, booking = time.monotonic(), self._state, routed.booking
        served = state.key_at(head.served) if head.served else None
        if served is not None and served != booking.key:
            state.suspect(booking.key, now)
            state.bookings.move(booking, served)
        report = _report(head)
        status = head.headers.get(":status", "")
        if status.startswith("2") and head.headers.get("content-type", "").startswith("text/event-stream"):
            state.bookings.responded(booking, (report.epoch, report.seq) if report else None, now)
        else:  # complete, or refused: nothing runs on
            state.bookings.release(booking, "answered" if status.startswith("2") else "error_status")
        if report is not None:
            state.reported(booking.key, report, now)
        if status in _UNAVAILABLE:
            state.suspect(booking.key, now)
        added = [(headers.REPLICA, booking.key.uid)]
        if routed.explanation is not None:
            added.append((headers.DECISION, routed.explanation))
        return added

    def closed(self, routed: Routed) -> None:
        """A stream that ends before the response headers was reset. Later the end of the stream is not the end of the request."""
        if routed.booking.state is State.PENDING:
            self._state.bookings.release(routed.booking, "reset")

    def _counted(self, refused: Refused) -> Refused:
        self._metrics.refusals.labels(reason=refused.reason).inc()
        return refused


def _entry(name: str, model: Model) -> dict[str, str | int]:
    """A served name as OpenAI's API describes a model."""
    return {"id": name, "object": "model", "created": int(model.created), "owned_by": "penstock"}


def _json(body: object) -> Answered:
    return Answered(status=200, body=orjson.dumps(body), reason="models")


def _report(head: ResponseHead) -> LoadReport | None:
    """The load report on a response; None where there is none of ours."""
    value = head.headers.get(headers.LOAD)
    if value is None:
        return None
    try:
        return load_report.decode(value)
    except LoadReportError as error:
        log.info("unreadable load report of %s: %s", head.served, error)
        return None


def _one_line(choice: Choice) -> str:
    """The reasons as the value of a header."""
    return "; ".join(choice.reasons).encode("ascii", "replace").decode().replace("\n", " ")
