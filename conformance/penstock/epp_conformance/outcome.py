"""What a picker made of one request: its answers in the request phase, and the pick in them."""

import ipaddress
from dataclasses import dataclass, field

import orjson

from penstock.epp_conformance import protocol
from penstock.epp_conformance._pb.envoy.service.ext_proc.v3.external_processor_pb2 import (
    CommonResponse,
    ImmediateResponse,
    ProcessingResponse,
)
from penstock.epp_conformance.verdict import Failed


@dataclass
class Outcome:
    """The answers, in order."""

    messages: list[ProcessingResponse] = field(default_factory=list)

    # --- the parts ---

    def kinds(self) -> list[str]:
        """What each answer is an answer to."""
        return [message.WhichOneof("response") or "nothing" for message in self.messages]

    def of(self, kind: str) -> list[ProcessingResponse]:
        """The answers of one kind."""
        return [message for message in self.messages if message.WhichOneof("response") == kind]

    @property
    def immediate(self) -> ImmediateResponse | None:
        """The picker's own answer to the client, if it gave one."""
        found = self.of("immediate_response")
        return found[0].immediate_response if found else None

    @property
    def chunks(self) -> list[tuple[bytes, bool]]:
        """Body and end of stream of each streamed chunk."""
        parts = [m.request_body.response.body_mutation for m in self.of("request_body")]
        streamed = [part.streamed_response for part in parts if part.WhichOneof("mutation") == "streamed_response"]
        return [(chunk.body, chunk.end_of_stream) for chunk in streamed]

    @property
    def body(self) -> bytes:
        """The body that goes on."""
        return b"".join(body for body, _ in self.chunks)

    # --- when it is over ---

    def complete(self, sent: int | None, trailers: bool) -> bool:
        """Whether the request phase is over: refused, or sent on as far as a gateway can tell.

        A chunk that says it is the last ends it, and so does one that no gateway would take, and the last byte that was sent:
        what is wrong with such an answer is for a check to say.
        """
        if self.immediate is not None:
            return True
        if not self.of("request_headers"):
            return False
        if trailers:
            return bool(self.of("request_trailers"))
        if len(self.of("request_body")) != len(self.chunks):
            return True
        return sent is None or (bool(self.chunks) and (self.chunks[-1][1] or len(self.body) >= sent))

    def awaited(self, trailers: bool) -> str:
        """What is missing, for a message."""
        if not self.of("request_headers"):
            return "answer to the request headers"
        return "answer to the request trailers" if trailers else "rest of the body"

    # --- what it says ---

    def picked(self, kind: str = "request_headers") -> "Pick":
        """The pick in the answer of that kind; `Failed` where there is none."""
        if self.immediate is not None:
            raise Failed(f"refused with {self.immediate.status.code}: {text(self.immediate.body)}")
        found = self.of(kind)
        if not found:
            raise Failed(f"there is no answer to {kind}, only to {', '.join(self.kinds()) or 'nothing'}")
        pick = Pick(found[0], common(found[0]))
        if pick.header is None and pick.metadata is None:
            raise Failed(f"the answer to {kind} names no destination")
        return pick

    def refused(self, *statuses: int) -> ImmediateResponse:
        """The picker's own answer; `Failed` unless it has one of these statuses."""
        wanted = " or ".join(str(status) for status in statuses)
        if self.immediate is None:
            where = self.picked().value if self.of("request_headers") else "nowhere"
            raise Failed(f"sent on to {where} where an ImmediateResponse {wanted} is due")
        if self.immediate.status.code not in statuses:
            raise Failed(f"answered {self.immediate.status.code} where {wanted} is due: {text(self.immediate.body)}")
        return self.immediate


def common(message: ProcessingResponse) -> CommonResponse:
    """The part that answers to headers and to bodies share."""
    return getattr(message, message.WhichOneof("response") or "request_headers").response


class Pick:
    """A destination, as it was said."""

    def __init__(self, message: ProcessingResponse, response: CommonResponse) -> None:
        self.message = message
        self.response = response
        sets = [o for o in response.header_mutation.set_headers if o.header.key.lower() == protocol.DESTINATION]
        self.header = (sets[0].header.raw_value.decode("latin-1") or sets[0].header.value) if sets else None
        namespace = message.dynamic_metadata.fields.get(protocol.METADATA_NAMESPACE)
        found = namespace.struct_value.fields.get(protocol.DESTINATION) if namespace is not None else None
        self.metadata = found.string_value if found is not None else None

    @property
    def value(self) -> str:
        """The destination, wherever it is said."""
        return self.header or self.metadata or ""

    @property
    def destinations(self) -> list[str]:
        """The ordered list."""
        return [item.strip() for item in self.value.split(",")]


def sets_of(response: ImmediateResponse | CommonResponse) -> dict[str, str]:
    """The headers that an answer sets."""
    mutation = response.headers if isinstance(response, ImmediateResponse) else response.header_mutation
    return {o.header.key.lower(): o.header.raw_value.decode("latin-1") or o.header.value for o in mutation.set_headers}


def is_endpoint(text: str) -> bool:
    """Whether `text` is `ip:port`, IPv6 in brackets."""
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        return False
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        address = ipaddress.ip_address(host[1:-1] if bracketed else host)
    except ValueError:
        return False
    return (address.version == 6) == bracketed


def text(body: bytes) -> str:
    """A body for a message: short, and printable."""
    return repr(body[:120].decode("utf-8", "replace"))


def error_object(body: bytes) -> dict[str, object]:
    """OpenAI's error object; `Failed` where the body is none."""
    try:
        error = orjson.loads(body)["error"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise Failed(f"the body is no OpenAI error: {text(body)}") from None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str) or not isinstance(error.get("type"), str):
        raise Failed(f"the error has no message and type: {text(body)}")
    return error
