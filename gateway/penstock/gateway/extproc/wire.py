"""Reads what a proxy says over ext_proc, and writes the answers to requests that have a destination.

There are two forms: protobuf's Python classes, which are the statement, and the compiled package.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from google.protobuf.struct_pb2 import Value

from penstock.api import headers
from penstock.gateway._pb.envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValueOption, Metadata
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2 import (
    CommonResponse,
    HeaderMutation,
    ProcessingRequest,
    ProcessingResponse,
)
from penstock.gateway.extproc.call import READ
from penstock.gateway.picker.compiled import Compiled

ATTRIBUTES, ADDRESS = "envoy.filters.http.ext_proc", "upstream.address"
NOTED = (headers.BOOKING, headers.NAME, "model")
"""The notes on a request that are passed to its response. Without the first there are none."""
OVERWRITE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
Fields = Mapping[str, str | float]
Answer = ProcessingResponse | bytes
"""A `ProcessingResponse`, or its bytes."""


class Pick(NamedTuple):
    """What an answer says that sends a request to its destination."""

    mutation: bytes
    """A `HeaderMutation`."""
    sets: Sequence[tuple[str, str]]
    """Headers to overwrite besides."""
    removes: Sequence[str]
    """Headers to remove besides."""
    metadata: Sequence[tuple[str, Fields]]
    """The fields of each of its namespaces."""


class Modes(NamedTuple):
    """What a proxy says that it sends; the numbers are `ProcessingMode.BodySendMode`'s, an open enum."""

    request_body: int
    response_body: int
    unasked: bool
    """It sends the request's body without waiting for the answer to the headers."""


class Message(NamedTuple):
    """What a `ProcessingRequest` says, as far as anybody looks at it."""

    kind: str
    """The name of its field of `request`; empty where it has none that is known."""
    observed: bool
    """Nobody waits for an answer."""
    headers: dict[str, str]
    """Those in `READ`, by lower-case names; of several with one name, the last. Empty for other kinds than headers."""
    body: bytes
    ends: bool
    """Of headers or a body: nothing of the message follows but trailers."""
    modes: Modes | None
    hint: tuple[str | list[str | None] | None] | None
    """The subset's value, of a request: a string or a list of strings; anything else as None, which allows nothing. None: the
    message has no hint."""
    noted: dict[str, str] | None
    """Those of `NOTED` that a response comes with."""
    served: str | None
    """The endpoint that a response is from, by the endpoint-picker protocol's metadata, else by Envoy's attribute."""


_MODES = Message._fields.index("modes")


class Wire(Protocol):
    """Reads and writes messages."""

    def read(self, data: bytes) -> Message:
        """The message; raises protobuf's `DecodeError` where it is none."""
        ...

    def picked(self, pick: Pick) -> bytes:
        """The answer to a request's headers that sends it to its destination."""
        ...

    def chunk(self, body: bytes, ends: bool) -> bytes:
        """The answer that has a chunk of the request's body, its last one where it `ends`."""
        ...


class PlainWire:
    """By protobuf."""

    def read(self, data: bytes) -> Message:
        """The message; raises `DecodeError` where it is none."""
        message = ProcessingRequest.FromString(data)
        kind = message.WhichOneof("request") or ""
        fields: dict[str, str] = {}
        body, ends, hint, noted, served = b"", False, None, None, None
        if kind.endswith("_headers"):
            head = message.request_headers if kind == "request_headers" else message.response_headers
            fields, ends = read_headers(head.headers), head.end_of_stream
        elif kind.endswith("_body"):
            part = message.request_body if kind == "request_body" else message.response_body
            body, ends = part.body, part.end_of_stream
        if kind == "response_headers":
            noted, served = _noted(message.metadata_context), _served(message)
        elif kind.startswith("request_"):
            hint = _hint(message.metadata_context)
        config = message.protocol_config if message.HasField("protocol_config") else None
        modes = None
        if config is not None:
            unasked = config.send_body_without_waiting_for_header_response
            modes = Modes(config.request_body_mode, config.response_body_mode, unasked)
        return Message(kind, message.observability_mode, fields, body, ends, modes, hint, noted, served)

    def picked(self, pick: Pick) -> bytes:
        """The answer that sends a request to its destination."""
        answer = ProcessingResponse()
        send_on(answer, answer.request_headers.response, pick)
        return answer.SerializeToString()

    def chunk(self, body: bytes, ends: bool) -> bytes:
        """The answer that has a chunk of the body."""
        answer = ProcessingResponse()
        chunk = answer.request_body.response.body_mutation.streamed_response
        chunk.body = body
        chunk.end_of_stream = ends
        return answer.SerializeToString()


class CompiledWire:
    """By the compiled package."""

    def __init__(self, compiled: Compiled) -> None:
        subset = headers.SUBSET_NAMESPACE, headers.SUBSET
        served = headers.METADATA_NAMESPACE, headers.DESTINATION_SERVED
        made = compiled.Wire(sorted(READ), subset, headers.LOG_NAMESPACE, NOTED, served, (ATTRIBUTES, ADDRESS))
        self.compiled = made
        self._read, self._picked, self.chunk = made.read, made.picked, made.chunk
        self._plain = PlainWire()

    def read(self, data: bytes) -> Message:
        """The message; raises `DecodeError` where it is none."""
        try:
            said = self._read(data)
        except ValueError:
            return self._plain.read(data)  # which says why, or takes what it can
        if (modes := said[_MODES]) is None:
            return Message._make(said)
        return Message._make((*said[:_MODES], Modes(*modes), *said[_MODES + 1 :]))

    def picked(self, pick: Pick) -> bytes:
        """The answer that sends a request to its destination."""
        return self._picked(*pick)


def as_bytes(answer: Answer) -> bytes:
    """The bytes of an answer."""
    return answer if isinstance(answer, bytes) else answer.SerializeToString()


def wire_of(compiled: Compiled | None) -> Wire:
    """What reads and writes messages."""
    return PlainWire() if compiled is None else CompiledWire(compiled)


def overwrite(mutation: HeaderMutation, name: str, value: str) -> None:
    """Overwrites a header. The action is stated, since the enum's zero value means append."""
    option = mutation.set_headers.add(append_action=OVERWRITE)
    option.header.key = name
    option.header.raw_value = value.encode()


def send_on(answer: ProcessingResponse, common: CommonResponse, pick: Pick) -> None:
    """Has `answer`, of which `common` is a part, send a request on its way."""
    common.clear_route_cache = True
    common.header_mutation.MergeFromString(pick.mutation)
    for name, value in pick.sets:
        overwrite(common.header_mutation, name, value)
    common.header_mutation.remove_headers.extend(pick.removes)
    for space, fields in pick.metadata:
        shown = answer.dynamic_metadata.fields[space].struct_value.fields
        for name, value in fields.items():
            if isinstance(value, str):
                shown[name].string_value = value
            else:
                shown[name].number_value = value


def read_headers(header_map: HeaderMap) -> dict[str, str]:
    """The headers in `READ`; see `Message.headers`."""
    found: dict[str, str] = {}
    for header in header_map.headers:
        name = header.key
        if name in READ or (name := name.lower()) in READ:
            found[name] = raw.decode("latin-1") if (raw := header.raw_value) else header.value
    return found


def _hint(metadata: Metadata) -> tuple[str | list[str | None] | None] | None:
    fields = metadata.filter_metadata.get(headers.SUBSET_NAMESPACE)
    return None if fields is None or headers.SUBSET not in fields.fields else (_plain(fields.fields[headers.SUBSET]),)


def _noted(metadata: Metadata) -> dict[str, str] | None:
    fields = metadata.filter_metadata.get(headers.LOG_NAMESPACE)
    if fields is None or NOTED[0] not in fields.fields:
        return None
    return {name: fields.fields[name].string_value for name in NOTED if name in fields.fields}


def _served(message: ProcessingRequest) -> str | None:
    metadata = message.metadata_context.filter_metadata.get(headers.METADATA_NAMESPACE)
    if metadata is not None and headers.DESTINATION_SERVED in metadata.fields:
        said = _plain(metadata.fields[headers.DESTINATION_SERVED])
        if isinstance(said, list) and len(said) == 1:
            said = said[0]
        if isinstance(said, str) and said:
            return said
    attributes = message.attributes.get(ATTRIBUTES)
    if attributes is not None and ADDRESS in attributes.fields:
        return attributes.fields[ADDRESS].string_value or None
    return None


def _plain(value: Value) -> str | list[str | None] | None:
    match value.WhichOneof("kind"):
        case "string_value":
            return value.string_value
        case "list_value":
            return [_string(item) for item in value.list_value.values]
        case _:
            return None


def _string(value: Value) -> str | None:
    return value.string_value if value.WhichOneof("kind") == "string_value" else None
