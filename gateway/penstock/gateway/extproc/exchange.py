"""One HTTP request on the ext_proc wire: a state machine, messages in, answers out, that knows no transport.

It serves every order that Envoy's body modes allow where the model can be read before the request goes on: full duplex (also
assumed where the caller does not say), buffered, and requests without a body. Modes that send the request on before its body
was seen cannot be served and are refused by name.
"""

from collections.abc import Iterable
from typing import Protocol

from google.protobuf.struct_pb2 import Value

from penstock.api import headers
from penstock.gateway._pb.envoy.config.core.v3.base_pb2 import HeaderMap
from penstock.gateway._pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
)
from penstock.gateway.extproc import answers
from penstock.gateway.extproc.body import MAX_BODY_BYTES, too_large
from penstock.gateway.extproc.call import Answered, Call, Refused, ResponseHead, Routed
from penstock.gateway.picker.subset import Subset, parse_subset

ATTRIBUTES = "envoy.filters.http.ext_proc"


class UnsupportedMode(Exception):
    """The gateway is configured so that no picker could work; the message names the setting."""


class Director(Protocol):
    """Who decides."""

    def preview(self, call: Call) -> None:
        """Looks at the head of a request; raises `Refused` where no body could save it."""
        ...

    async def route(self, call: Call) -> Routed | Answered:
        """Decides where a complete request goes; may take as long as it is held; raises `Refused`."""
        ...

    def responded(self, routed: Routed, head: ResponseHead) -> list[tuple[str, str]]:
        """Takes in the head of the response; returns headers to add to it."""
        ...

    def closed(self, routed: Routed) -> None:
        """The exchange is over."""
        ...


class Exchange:
    """The picker's side of one HTTP request."""

    def __init__(self, director: Director) -> None:
        self._director = director
        self._duplex = True
        self._response_duplex = False
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._subset: Subset | None = None
        self._routed: Routed | None = None
        self._decided = False
        """Nothing more of the request counts: it was sent on or answered."""
        self.over = False
        """The gateway has answered: there will be no response phase."""

    async def receive(self, message: ProcessingRequest) -> list[ProcessingResponse]:
        """The answers to one message; raises `UnsupportedMode`."""
        if message.observability_mode:
            return []
        try:
            match message.WhichOneof("request"):
                case "request_headers":
                    self._hint(message)
                    return await self._request_headers(message)
                case "request_body":
                    self._hint(message)
                    return await self._request_body(message.request_body.body, message.request_body.end_of_stream)
                case "request_trailers":
                    self._hint(message)
                    return await self._request_trailers()
                case "response_headers":
                    return [self._response_headers(message)]
                case "response_body":
                    body = message.response_body
                    return [answers.response_body(body.body, body.end_of_stream, self._response_duplex)]
                case "response_trailers":
                    return [answers.response_trailers()]
                case _:
                    return []
        except Refused as refused:
            return [self._answered(answers.refusal(refused))]

    def close(self) -> None:
        """The stream has ended, by whomever."""
        if self._routed is not None:
            self._director.closed(self._routed)

    async def _request_headers(self, message: ProcessingRequest) -> list[ProcessingResponse]:
        head = message.request_headers
        self._headers = read_headers(head.headers)
        if message.HasField("protocol_config"):
            self._response_duplex = message.protocol_config.response_body_mode == ProcessingMode.FULL_DUPLEX_STREAMED
            self._duplex = _is_duplex(message.protocol_config.request_body_mode, head)
        self._director.preview(Call(headers=self._headers))
        if head.end_of_stream:
            outcome = await self._decide()
            return [answers.request_headers(outcome)] if isinstance(outcome, Routed) else [outcome]
        return [] if self._duplex else [answers.request_headers()]

    async def _request_body(self, body: bytes, ends: bool) -> list[ProcessingResponse]:
        if self._decided:  # some Envoys deliver the last chunk of a large body twice
            return []
        self._body += body
        if len(self._body) > MAX_BODY_BYTES:
            raise too_large()
        if self._duplex:
            return await self._send_on(ends=True) if ends else []
        outcome = await self._decide(bytes(self._body))
        return [answers.request_body(outcome)] if isinstance(outcome, Routed) else [outcome]

    async def _request_trailers(self) -> list[ProcessingResponse]:
        if self._decided or not self._duplex:
            return [answers.request_trailers()]
        sent = await self._send_on(ends=False)
        return [*sent, answers.request_trailers()] if self._routed is not None else sent

    async def _send_on(self, ends: bool) -> list[ProcessingResponse]:
        """The body is complete: headers, which waited for it, and the whole body again."""
        body = bytes(self._body)
        self._body.clear()
        outcome = await self._decide(body)
        if not isinstance(outcome, Routed):
            return [outcome]
        return [answers.request_headers(outcome), *answers.streamed_request_body(body, ends)]

    async def _decide(self, body: bytes = b"") -> Routed | ProcessingResponse:
        self._decided = True
        outcome = await self._director.route(Call(headers=self._headers, body=body, subset=self._subset))
        if isinstance(outcome, Answered):
            return self._answered(outcome)
        self._routed = outcome
        return outcome

    def _answered(self, answer: Answered) -> ProcessingResponse:
        self._decided = self.over = True
        return answers.immediate(answer)

    def _response_headers(self, message: ProcessingRequest) -> ProcessingResponse:
        if self._routed is None:  # answered by the gateway itself
            return answers.response_headers()
        head = ResponseHead(headers=read_headers(message.response_headers.headers), served=_served(message))
        return answers.response_headers(self._director.responded(self._routed, head))

    def _hint(self, message: ProcessingRequest) -> None:
        """Callers differ in which message carries the subset: whichever does counts."""
        if not message.HasField("metadata_context"):
            return
        fields = message.metadata_context.filter_metadata.get(headers.SUBSET_NAMESPACE)
        if fields is not None and headers.SUBSET in fields.fields:
            self._subset = parse_subset(_plain(fields.fields[headers.SUBSET]))


def read_headers(header_map: HeaderMap) -> dict[str, str]:
    """Headers by name; of several with one name, the last."""
    return {h.key: h.raw_value.decode("latin-1") if h.raw_value else h.value for h in header_map.headers}


def _is_duplex(mode: int, head: HttpHeaders) -> bool:
    if mode == ProcessingMode.FULL_DUPLEX_STREAMED:
        return True
    if mode == ProcessingMode.BUFFERED or head.end_of_stream:
        return False
    name = ProcessingMode.BodySendMode.Name(mode)  # type: ignore[arg-type] - an open enum
    raise UnsupportedMode(f"request_body_mode {name}: the model is in the body; use FULL_DUPLEX_STREAMED or BUFFERED")


def _served(message: ProcessingRequest) -> str | None:
    """Who answered: by the endpoint-picker protocol's metadata, else by Envoy's attribute."""
    metadata = message.metadata_context.filter_metadata.get(headers.METADATA_NAMESPACE)
    if metadata is not None and headers.DESTINATION_SERVED in metadata.fields:
        return metadata.fields[headers.DESTINATION_SERVED].string_value or None
    attributes = message.attributes.get(ATTRIBUTES)
    if attributes is not None and "upstream.address" in attributes.fields:
        return attributes.fields["upstream.address"].string_value or None
    return None


def _plain(value: Value) -> object:
    """A string or a list of strings; anything else as None, which allows nothing."""
    match value.WhichOneof("kind"):
        case "string_value":
            return value.string_value
        case "list_value":
            return [_string(item) for item in _values(value)]
        case _:
            return None


def _values(value: Value) -> Iterable[Value]:
    return value.list_value.values


def _string(value: Value) -> str | None:
    return value.string_value if value.WhichOneof("kind") == "string_value" else None
