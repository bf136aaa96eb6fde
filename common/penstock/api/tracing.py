"""Traces: OpenTelemetry spans, the W3C trace context that joins them, and their form for a collector (OTLP in JSON)."""

import random
import secrets
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

TRACEPARENT: Final = "traceparent"
SAMPLED: Final = 1
"""The flag of the W3C trace context that says that the trace is recorded."""

Value = str | int | float | bool | Sequence[str]
Kind = Literal["internal", "server"]
_KINDS: Final[Mapping[Kind, int]] = {"internal": 1, "server": 2}
_ERROR: Final = 2


class TraceContext(msgspec.Struct, frozen=True):
    """One span's place in a trace."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 of them."""
    sampled: bool = True

    @staticmethod
    def root(sampled: bool = True) -> "TraceContext":
        """The first span of a new trace."""
        return TraceContext(secrets.token_hex(16), secrets.token_hex(8), sampled)

    def child(self) -> "TraceContext":
        """A new span below this one."""
        return TraceContext(self.trace_id, secrets.token_hex(8), self.sampled)

    def traceparent(self) -> str:
        """Return the `traceparent` header."""
        return f"00-{self.trace_id}-{self.span_id}-{SAMPLED if self.sampled else 0:02x}"


def parse_traceparent(value: str | None) -> TraceContext | None:
    """What a `traceparent` says (https://www.w3.org/TR/trace-context); None for one that says nothing, which is as if there were
    none."""
    parts = value.strip().split("-") if value is not None else []
    if len(parts) < 4 or [len(part) for part in parts[:4]] != [2, 32, 16, 2] or parts[0] == "ff":
        return None
    if parts[0] == "00" and len(parts) != 4:
        return None
    if any(set(part) - set("0123456789abcdef") for part in parts[:4]) or not parts[1].strip("0") or not parts[2].strip("0"):
        return None
    return TraceContext(parts[1], parts[2], bool(int(parts[3], 16) & SAMPLED))


def begin(traceparent: str | None, percent: float = 100.0) -> tuple[TraceContext, str | None]:
    """Return a new span's context and its parent's span id.

    With a valid `traceparent` the span is a child. Otherwise it is the root of a new trace, and `percent` of such traces are
    recorded.
    """
    parent = parse_traceparent(traceparent)
    if parent is None:
        return TraceContext.root(sampled=random.random() * 100 < percent), None
    return parent.child(), parent.span_id


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One that is over."""

    name: str
    context: TraceContext
    parent: str | None
    """The parent's span id."""
    kind: Kind = "internal"
    start_s: float
    """Unix time in seconds, as `end_s`."""
    end_s: float
    attributes: Mapping[str, Value] = {}
    error: str | None = None
    """What went wrong."""


def encode(spans: Sequence[Span], resource: Mapping[str, Value]) -> bytes:
    """An OTLP request (`ExportTraceServiceRequest`) in JSON: ids in hexadecimal, 64-bit integers as text."""
    scope = {"scope": {"name": "penstock"}, "spans": [_span(span) for span in spans]}
    return msgspec.json.encode({"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}]})


def _span(span: Span) -> dict[str, object]:
    return {
        "traceId": span.context.trace_id,
        "spanId": span.context.span_id,
        **({"parentSpanId": span.parent} if span.parent is not None else {}),
        "name": span.name,
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": str(round(span.start_s * 1e9)),
        "endTimeUnixNano": str(round(max(span.end_s, span.start_s) * 1e9)),
        "attributes": _attributes(span.attributes),
        **({"status": {"code": _ERROR, "message": span.error}} if span.error is not None else {}),
    }


def _attributes(values: Mapping[str, Value]) -> list[dict[str, object]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Value) -> dict[str, object]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
        case _:
            return {"arrayValue": {"values": [_value(each) for each in value]}}
