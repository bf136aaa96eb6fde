"""Trace contexts, and OTLP in JSON."""

import json

import pytest

from penstock.api.tracing import Span, TraceContext, begin, encode, parse_traceparent

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def span(name: str = "s") -> Span:
    return Span(name=name, context=TraceContext(TRACE, PARENT), parent=None, start_s=1.5, end_s=2.0)


def test_a_header_is_read_as_it_is_written() -> None:
    for sampled in (True, False):
        context = TraceContext(TRACE, PARENT, sampled)
        assert parse_traceparent(context.traceparent()) == context
    assert parse_traceparent(f"01-{TRACE}-{PARENT}-01-more") == TraceContext(TRACE, PARENT), "a later version may say more"
    assert parse_traceparent(f"00-{TRACE}-{PARENT}-03") == TraceContext(TRACE, PARENT), "of the flags one is ours"


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "00",
        f"00-{TRACE}-{PARENT}",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-0x",
        "é" * 55,
    ],
)
def test_a_header_that_says_nothing_begins_a_trace(value: str | None) -> None:
    assert parse_traceparent(value) is None
    context, parent = begin(value)
    assert parent is None and context.sampled and parse_traceparent(context.traceparent()) == context


def test_a_share_of_new_traces_is_recorded_and_others_are_as_they_began() -> None:
    assert not begin(None, percent=0.0)[0].sampled
    context, parent = begin(f"00-{TRACE}-{PARENT}-01", percent=0.0)
    assert (context.trace_id, parent, context.sampled) == (TRACE, PARENT, True) and context.span_id != PARENT
    assert not begin(f"00-{TRACE}-{PARENT}-00")[0].sampled


def test_values_have_their_types() -> None:
    attributes = {"text": "a", "yes": True, "count": 2**60, "share": 0.5, "list": ["a", 1]}
    body = json.loads(encode([Span(**{**_fields(), "attributes": attributes, "error": "bad"})], {"service.name": "x"}))
    [resource] = body["resourceSpans"]
    assert resource["resource"]["attributes"] == [{"key": "service.name", "value": {"stringValue": "x"}}]
    [found] = resource["scopeSpans"][0]["spans"]
    assert (found["startTimeUnixNano"], found["endTimeUnixNano"]) == ("1500000000", "2000000000")
    assert found["status"] == {"code": 2, "message": "bad"} and "parentSpanId" not in found
    assert {it["key"]: it["value"] for it in found["attributes"]} == {
        "text": {"stringValue": "a"},
        "yes": {"boolValue": True},
        "count": {"intValue": str(2**60)},
        "share": {"doubleValue": 0.5},
        "list": {"arrayValue": {"values": [{"stringValue": "a"}, {"intValue": "1"}]}},
    }


def _fields() -> dict[str, object]:
    its = span()
    return {name: getattr(its, name) for name in its.__struct_fields__}
