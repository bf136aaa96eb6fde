"""Messages that a proxy may send, and what is no message, read by protobuf and by the compiled parts; answers that both write."""

import contextlib
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct
from hypothesis import given, settings
from hypothesis import strategies as st
from wires import BothWires, read

from penstock.api import headers
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from penstock.gateway.extproc.call import READ
from penstock.gateway.extproc.wire import ADDRESS, ATTRIBUTES, NOTED, CompiledWire, Pick
from penstock.gateway.picker.compiled import MODULE, installed

pytest.importorskip(MODULE, reason="penstock-gateway-native is not built: make native")
KINDS = [f"{side}_{part}" for side in ("request", "response") for part in ("headers", "body", "trailers")]
words = st.text(max_size=6)
texts = words | st.integers(100, 300).map("x".__mul__)
"""Some are so long that what they are in needs two bytes for its size."""
values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)
places = st.sampled_from(
    [
        (headers.SUBSET_NAMESPACE, headers.SUBSET),
        (headers.METADATA_NAMESPACE, headers.DESTINATION_SERVED),
        (ATTRIBUTES, ADDRESS),
        *((headers.LOG_NAMESPACE, name) for name in NOTED),
        ("other", "name"),
    ]
)
said = st.lists(st.tuples(places, values), max_size=4)
names = st.sampled_from([*sorted(READ), "Content-Type", "X-REQUEST-ID", "other", "ÄÖ"])


@st.composite
def messages(draw: Any) -> ProcessingRequest:
    kind = draw(st.sampled_from(["", *KINDS]))
    message = ProcessingRequest(observability_mode=draw(st.booleans()))
    if kind:
        getattr(message, kind).SetInParent()
    if kind.endswith("headers"):
        head = getattr(message, kind)
        head.end_of_stream = draw(st.booleans())
        for name, text, raw in draw(st.lists(st.tuples(names, words, st.binary(max_size=6)), max_size=6)):
            head.headers.headers.add(key=name, value=text, raw_value=raw)
    elif kind.endswith("body"):
        part = getattr(message, kind)
        part.body, part.end_of_stream = draw(st.binary(max_size=40)), draw(st.booleans())
    for into in (message.metadata_context.filter_metadata, message.attributes):
        fields: dict[str, dict[str, Any]] = {}
        for (space, name), value in draw(said):
            fields.setdefault(space, {})[name] = value
        for space, of in fields.items():
            into[space].CopyFrom(Struct())
            into[space].update(of)
    if draw(st.booleans()):
        config = message.protocol_config
        config.request_body_mode, config.response_body_mode = draw(st.integers(0, 9)), draw(st.integers(-(2**31), 2**31 - 1))
        config.send_body_without_waiting_for_header_response = draw(st.booleans())
    return message


@settings(max_examples=200)
@given(messages(), messages(), st.integers(0, 400), st.binary(max_size=3))
def test_both_forms_read_alike(message: ProcessingRequest, more: ProcessingRequest, at: int, instead: bytes) -> None:
    wires, data = BothWires(), message.SerializeToString()
    assert wires.read(data).kind == (message.WhichOneof("request") or "")
    wires.read(data + more.SerializeToString())  # which is their sum
    with contextlib.suppress(DecodeError):
        wires.read(data[:at])
    message.ClearField("attributes")  # not entries of maps: of those with unknown fields the forms make different things
    message.ClearField("metadata_context")
    data = message.SerializeToString()
    with contextlib.suppress(DecodeError):
        wires.read(data[:at] + instead + data[at + len(instead) :])


def test_the_compiled_form_reads_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = installed()
    assert compiled is not None
    wire = CompiledWire(compiled)
    monkeypatch.delattr(wire, "_plain")
    message = ProcessingRequest()
    message.response_headers.headers.headers.add(key="X-Request-Id", raw_value="é".encode("latin-1"))
    message.metadata_context.filter_metadata[headers.LOG_NAMESPACE].update({headers.BOOKING: "b", "model": 7, "other": "x"})
    message.attributes[ATTRIBUTES].update({ADDRESS: "10.0.0.1:8000"})
    found = wire.read(message.SerializeToString())
    assert found == read(message)
    assert (found.headers, found.noted, found.served) == ({"x-request-id": "é"}, {"booking": "b", "model": ""}, "10.0.0.1:8000")


@settings(max_examples=50)
@given(
    st.lists(st.tuples(words, texts), max_size=3),
    st.lists(words, max_size=3),
    st.dictionaries(words, st.dictionaries(words, texts | st.floats(allow_nan=False), min_size=1), max_size=2),
)
def test_both_forms_write_alike(sets: list[tuple[str, str]], removes: list[str], metadata: dict[str, dict[str, Any]]) -> None:
    answer = ProcessingResponse.FromString(BothWires().picked(Pick(b"\x12\x01a", sets, removes, list(metadata.items()))))
    mutation = answer.request_headers.response.header_mutation
    assert [(it.header.key, it.header.raw_value.decode()) for it in mutation.set_headers] == sets
    assert mutation.remove_headers == ["a", *removes]
    assert {space: dict(of.struct_value.fields) for space, of in answer.dynamic_metadata.fields.items()}.keys() == metadata.keys()


@pytest.mark.parametrize("size", [0, 1, 100, 110, 120, 127, 128, 16_360, 16_370, 16_383, 16_384, 62_000])
def test_both_forms_write_chunks_alike(size: int) -> None:
    for ends in (False, True):
        answer = ProcessingResponse.FromString(BothWires().chunk(b"x" * size, ends))
        streamed = answer.request_body.response.body_mutation.streamed_response
        assert (len(streamed.body), streamed.end_of_stream) == (size, ends)
