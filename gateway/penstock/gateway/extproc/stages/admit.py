"""When a request goes on: at once where its model's replicas have room, else when its turn comes."""

import time
from contextlib import suppress
from itertools import count

import msgspec

from penstock.api import headers
from penstock.api.fleet import Model
from penstock.gateway.extproc.body import parse_body
from penstock.gateway.extproc.call import Call, Refused
from penstock.gateway.extproc.passage import Passage
from penstock.gateway.extproc.stages.resolve import Resolve
from penstock.gateway.flow.gate import FleetMoved, FlowGate, TurnedAway
from penstock.gateway.flow.ticket import Ticket
from penstock.gateway.http.flow_metrics import FlowMetrics


class Admit:
    """Flow control's place among the stages."""

    def __init__(self, gate: FlowGate, resolve: Resolve, metrics: FlowMetrics) -> None:
        self._gate = gate
        self._resolve = resolve
        self._metrics = metrics
        self._ordinals = count()

    def at_once(self, passage: Passage) -> bool:
        """Whether the request goes on now, and `leave` must follow; else `run` must. Raises `Refused`."""
        passage.entered, passage.charged = None, 0
        passage.patience_s = _patience_s(passage.call)
        return self._enters(passage)

    async def run(self, passage: Passage) -> None:
        """Returns when a request that did not go on at once may, and `leave` must follow; raises `Refused`. What a gateway's
        subset leaves out is not waited for."""
        tokens, ordinal = passage.guess, None
        while True:
            if passage.subset is not None and not self._gate.anybody(passage.model):
                return
            ordinal = next(self._ordinals) if ordinal is None else ordinal
            model = passage.model
            # What was read of a body takes up to 25 times its bytes: who waits keeps the bytes alone.
            passage.body = msgspec.structs.replace(passage.body, fields={})
            with suppress(FleetMoved):
                await self._wait(passage, tokens, ordinal)
                passage.entered, passage.charged = model, tokens
            passage.body = parse_body(passage.call.body)
            # While it waited its model may have gone, its name become another's, its pool got other members.
            try:
                self._resolve.run(passage)
            except Refused:
                self.leave(passage, in_vain=False)
                raise
            if passage.entered is not None or self._enters(passage):
                return

    def _enters(self, passage: Passage) -> bool:
        """Whether there is room for the request, which then holds it."""
        if not self._gate.enter(passage.model, passage.guess, time.monotonic(), passage.adapter):
            return False
        passage.entered = passage.model
        return True

    def leave(self, passage: Passage, *, in_vain: bool) -> None:
        """Release the request's hold on capacity after it was booked or given up. `in_vain`: no replica could be picked."""
        if passage.entered is not None:
            self._gate.leave(passage.entered, in_vain=in_vain)
            passage.entered = None

    async def _wait(self, passage: Passage, tokens: int, ordinal: int) -> None:
        model, tenant, patience = passage.model, passage.tenant, passage.patience_s
        hold = model.hold_timeout_s
        ticket = Ticket(
            model=self._gate.queue(model, passage.adapter),
            tenant=tenant.name,
            priority=passage.band,
            weight=tenant.limits.weight,
            tokens=tokens,
            size=len(passage.call.body),
            until=passage.came + (hold if patience is None else min(hold, patience)),
            ordinal=ordinal,
        )
        began, outcome = time.monotonic(), "left"
        try:
            await self._gate.wait(ticket, model, tenant.limits.max_queued, passage.adapter)
            outcome = "went_on"
        except FleetMoved:
            outcome = "asked_again"
            raise
        except TurnedAway as away:
            # By which of the two is shorter, not by the clock: a timer of uvloop's may go off a part of a millisecond early.
            refused = _refusal(model, passage.adapter, away, given_up=patience is not None and patience <= hold)
            outcome = refused.reason
            raise refused from None
        finally:
            self._metrics.waits.labels(model=model.id, outcome=outcome).observe(time.monotonic() - began)


def _patience_s(call: Call) -> float | None:
    """How long the client waits, as it says; None where it does not; raises `Refused` with 400 for what is no time."""
    given = call.headers.get(headers.TIMEOUT)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and int(given[:10]) > 0 and len(given) <= 10):
        message = f"{headers.TIMEOUT} must be a whole number of milliseconds from 1 on, of ten digits at most"
        raise Refused(400, message, "invalid_timeout", param=headers.TIMEOUT)
    return int(given) / 1000


def _refusal(model: Model, adapter: str | None, away: TurnedAway, *, given_up: bool) -> Refused:
    name, reason, after = repr(model.name), away.reason, away.retry_after_s
    again = f"try again in {after} s"
    match reason:
        case "tenant_queue_full":
            return Refused(429, f"too many of your requests wait already; {again}", reason, retry_after_s=after)
        case "queue_full":
            return Refused(503, f"too many requests wait for model {name}; {again}", reason, retry_after_s=after)
        case "displaced":
            message = f"too many requests wait, and more important ones have come; {again}"
            return Refused(503, message, reason, retry_after_s=after)
        case "shutting_down":
            return Refused(503, "the gateway is shutting down; try again", reason, retry_after_s=after)
        case "no_ready_replica":
            what = f"model {name} has no ready replica"
        case "adapter_not_loaded":
            what = f"no ready replica of model {name} has adapter {adapter!r} yet"
        case "saturated":
            what = f"the replicas of model {name} are busy"
    if given_up:
        message = f"{what}, and {headers.TIMEOUT} is over; {again}"
        return Refused(503, message, "deadline_exceeded", retry_after_s=after)
    waited = f", and that did not change within {model.hold_timeout_s:g} s" if model.hold_timeout_s > 0 else ""
    return Refused(503, f"{what}{waited}; {again}", reason, retry_after_s=after)
