"""The gateway's spans: one for each decision, below Envoy's of the exchange with the picker, with what tipped it."""

import asyncio
import time
from dataclasses import dataclass

import msgspec

from penstock.api import headers
from penstock.api.tracing import TRACEPARENT, Span, Value, begin
from penstock.gateway.extproc.call import Answered, Call, Refused, Routed
from penstock.gateway.extproc.decisions import DecisionLog
from penstock.gateway.extproc.exchange import Director
from penstock.http.span_exporter import SpanExporter


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """Where spans go, and how many."""

    endpoint: str
    """A collector's OTLP/HTTP endpoint for traces, `http://…`; the gateway and Envoy both reach it."""
    percent: float = 100.0
    """Of the requests that bring no trace of their own: as many are recorded."""


class TracedDirector:
    """A director that tells a collector of each decision.

    Args:
        director: Who decides.
        decisions: Where it notes why.
        exporter: Takes the spans to the collector.
        percent: Of the requests without a trace, as many are recorded.
    """

    def __init__(self, director: Director, decisions: DecisionLog, exporter: SpanExporter, percent: float = 100.0) -> None:
        self._percent = percent
        self._director = director
        self._decisions = decisions
        self._exporter = exporter
        self.usual_heads = director.usual_heads
        self.at_once = None  # each decision has a span
        self.preview = director.preview
        self.responded = director.responded
        self.returned = director.returned
        self.passed_on = director.passed_on
        self.ended = director.ended
        self.closed = director.closed
        self.refused = director.refused

    async def route(self, call: Call) -> Routed | Answered:
        """Choose the destination of a complete request."""
        context, parent = begin(call.traceparent or call.headers.get(TRACEPARENT), self._percent)
        start, attributes, error = time.time(), dict[str, Value](), None
        try:
            result = await self._director.route(call)
            if isinstance(result, Routed):
                attributes = self._of_routed(call, result) if context.sampled else {}
                if parent is None:  # nobody before us has begun a trace that the replica could go on with
                    return msgspec.structs.replace(result, sets=[*result.sets, (TRACEPARENT, context.traceparent())])
            return result
        except Refused as refused:
            attributes, error = {"http.response.status_code": refused.status, "error.type": refused.reason}, str(refused)
            raise
        except asyncio.CancelledError:
            error = "the caller has gone"
            raise
        finally:
            if context.sampled:
                noted = {**_of_call(call), **attributes}
                span = Span(
                    name="pick",
                    context=context,
                    parent=parent,
                    kind="server",
                    start_s=start,
                    end_s=time.time(),
                    attributes=noted,
                    error=error,
                )
                self._exporter.add(span)

    def _of_routed(self, call: Call, routed: Routed) -> dict[str, Value]:
        attributes: dict[str, Value] = {"penstock.endpoints": routed.endpoints, "penstock.pool": routed.booking.key.uid}
        request_id = routed.request_id or call.headers.get(headers.REQUEST_ID)
        for decision in self._decisions.last(1, request_id=request_id):
            attributes |= {
                "gen_ai.request.model": decision.model,
                "gen_ai.usage.input_tokens": decision.prompt_tokens,
                "penstock.policy": decision.policy,
                "penstock.replica": decision.picked,
                "penstock.pool": decision.candidates[0].pool,
                "penstock.score": decision.candidates[0].score,
                "penstock.resident_tokens": decision.candidates[0].resident_tokens,
                "penstock.candidates": len(decision.candidates),
                "penstock.waited_s": decision.waited_s,
                "penstock.reasons": decision.reasons,
                **{f"penstock.term.{name}": value for name, value in decision.candidates[0].terms.items()},
            }
        return attributes


def _of_call(call: Call) -> dict[str, Value]:
    found = {"url.path": call.path, "gen_ai.request.id": call.headers.get(headers.REQUEST_ID)}
    return {name: value for name, value in found.items() if value is not None}
