"""One HTTP request on the ext_proc wire: a state machine, messages in, answers out, that knows no transport.

It serves every order that Envoy's body modes allow where the model can be read before the request goes on: full duplex (also
assumed where the caller does not say), buffered, streamed where the caller sends the body without waiting for the answer to the
headers, and requests without a body. Modes that send the request on before its body was seen, or that promise nothing of headers
in the answer to a body, cannot be served and are refused by name.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from penstock.gateway._pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
from penstock.gateway.extproc import answers
from penstock.gateway.extproc.body import MAX_BODY_BYTES, too_large
from penstock.gateway.extproc.call import SHUTTING_DOWN, Answered, Call, Refused, ResponseHead, Routed
from penstock.gateway.extproc.ceiling import Ceiling
from penstock.gateway.extproc.wire import Answer, Message, Modes, PlainWire, Wire
from penstock.gateway.picker.choice import MAX_ENDPOINTS
from penstock.gateway.picker.compiled import UsualHeads
from penstock.gateway.picker.subset import Subset, parse_subset

# What the endpoint-picker protocol requires of a gateway; older Envoys do not say what they do.
_ASSUMED = Modes(ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.FULL_DUPLEX_STREAMED, unasked=False)
_BUFFERING = (ProcessingMode.BUFFERED, ProcessingMode.BUFFERED_PARTIAL)


class UnsupportedMode(Exception):
    """The gateway is configured so that no picker could work, or breaks the protocol; the message names the setting."""


class HandedOver(Exception):
    """This process is going and has decided nothing: the gateway asks another with the whole request again."""


class Director(Protocol):
    """Makes the decisions of the exchanges."""

    @property
    def usual_heads(self) -> UsualHeads | None:
        """What may take in heads of responses without `returned`; None: nothing does."""
        ...

    @property
    def at_once(self) -> Callable[[dict[str, str], bytes], Routed | None] | None:
        """What may decide requests without `preview` and `route`, by their headers and bodies, where these are usual; it returns
        None for others, of which nothing has changed then. None: nothing does."""
        ...

    def preview(self, call: Call) -> None:
        """Looks at the head of a request; raises `Refused` where no body could save it."""
        ...

    async def route(self, call: Call) -> Routed | Answered:
        """Choose the destination of a complete request. May take as long as the request is held. Raises `Refused`."""
        ...

    def responded(self, routed: Routed, head: ResponseHead) -> list[tuple[str, str]]:
        """Takes in the head of the response; returns headers to add to it."""
        ...

    def returned(self, noted: Mapping[str, str], head: ResponseHead) -> list[tuple[str, str]]:
        """As `responded`, for an exchange that saw only the response. `noted` is `Routed.log`, written by this process or another
        one."""
        ...

    def passed_on(self, routed: Routed) -> None:
        """The exchange is over, and the request has gone to its replica; `returned` will show the response."""
        ...

    def ended(self, routed: Routed) -> None:
        """The whole response has passed: only gateways that send response bodies show that."""
        ...

    def closed(self, routed: Routed) -> None:
        """The exchange is over."""
        ...

    def refused(self, call: Call, refused: Refused) -> None:
        """Record that the request was answered with an error, by the gateway or the director. `call` may have no body."""
        ...


class Exchange:
    """The picker's side of one HTTP request.

    Args:
        director: Who decides.
        destinations: The longest list of destinations that the gateway reads.
        inference_pool: The InferencePool that the gateway asks for; None for our own Envoy, which asks for all models.
        ceiling: What all requests together may keep; None: this one is alone.
        apart: Another exchange has the response.
        traceparent: The span of this exchange at the gateway; None: it has none.
        wire: What writes the answers; None: protobuf.
    """

    def __init__(
        self,
        director: Director,
        destinations: int = MAX_ENDPOINTS,
        inference_pool: str | None = None,
        ceiling: Ceiling | None = None,
        *,
        apart: bool = False,
        traceparent: str | None = None,
        wire: Wire | None = None,
    ) -> None:
        self._wire = wire or PlainWire()
        self._traceparent = traceparent
        self._director = director
        self._ceiling = ceiling or Ceiling()
        self._apart = apart
        self._entered = False
        self._kept = 0
        """Bytes of the body that count under the ceiling."""
        self._inference_pool = inference_pool
        self._destinations = destinations
        self._modes = _ASSUMED
        self._duplex = True
        """The gateway forgets the body, and gets it again."""
        self._waits = True
        """The answer to the headers waits for the body."""
        self._headers: dict[str, str] | None = None
        self._body = bytearray()
        self._chunks = 0
        self._subset: Subset | None = None
        self._routed: Routed | None = None
        self._decided = False
        """True once the request was sent on or answered: what else comes of it is ignored."""
        self._bodies = False
        """The gateway sends response bodies, so that the end of the stream is that of the response."""
        self._response_ended = False
        """The last of the response's body has come."""
        self.over = False
        """The gateway has answered: there will be no response phase."""

    async def receive(self, message: Message) -> list[Answer]:
        """The answers to one message; raises `UnsupportedMode` and `HandedOver`."""
        if message.observed:
            self._observe(message)
            return []
        try:
            if message.hint is not None:  # callers differ in which message carries the subset: whichever does counts
                self._subset = parse_subset(message.hint[0])
            match message.kind:
                case "request_headers":
                    return await self._request_headers(message)
                case "request_body":
                    return await self._request_body(message.body, message.ends)
                case "request_trailers":
                    return await self._request_trailers()
                case "response_headers":
                    return [self._response_headers(message)]
                case "response_body":
                    return [*self._response_body(message)]
                case "response_trailers":
                    return [answers.response_trailers()]
                case _:
                    return []
        except Refused as refused:
            # Our own Envoy still has what it sent, as long as nothing was answered.
            if hands_over(refused) and self._duplex and self._inference_pool is None:
                raise HandedOver(str(refused)) from None
            self._director.refused(Call(headers=self._headers or {}), refused)
            return [self._answered(answers.refusal(refused))]

    def failed(self) -> ProcessingResponse:
        """The answer where a mistake of ours keeps the request from being decided."""
        return self._answered(failure())

    def told(self) -> None:
        """The answers so far are about to be sent."""
        if self._routed is not None:
            self._routed.choice = None
        if self._apart and self._routed is not None and not self.over:
            self._director.passed_on(self._routed)
            self._routed, self.over = None, True

    def close(self) -> None:
        """Either side has ended the stream."""
        self._let_go()
        if self._entered:
            self._ceiling.leave()
            self._entered = False
        if self._routed is not None:
            if self._bodies:
                self._director.ended(self._routed)
            self._director.closed(self._routed)

    async def _request_headers(self, message: Message) -> list[Answer]:
        if self._headers is not None:
            raise UnsupportedMode("request headers came twice on one stream")
        self._headers = message.headers
        if message.modes is not None:
            self._modes = message.modes
            self._duplex = self._modes.request_body == ProcessingMode.FULL_DUPLEX_STREAMED
            self._waits = _waits(self._modes, message.ends)
        self._ceiling.enter()
        self._entered = True
        self._director.preview(Call(headers=self._headers))
        if message.ends:
            outcome = await self._decide(b"")
            return [answers.picked(outcome, self._wire)] if isinstance(outcome, Routed) else [outcome]
        return [] if self._waits else [answers.request_headers()]

    async def _request_body(self, body: bytes, ends: bool) -> list[Answer]:
        if self._decided:  # some Envoys deliver the last chunk of a large body twice
            return []
        self._ceiling.grow(len(body))
        self._kept += len(body)
        self._body += body
        self._chunks += 1
        if len(self._body) > MAX_BODY_BYTES:
            raise too_large()
        if self._waits:
            return await self._send_on(ends=True) if ends else []
        outcome = await self._decide(self._taken())
        return [answers.request_body(outcome)] if isinstance(outcome, Routed) else [outcome]

    async def _request_trailers(self) -> list[Answer]:
        if self._decided:
            return [answers.request_trailers()]
        if not self._waits:  # no body at all; and an answer to trailers can name no destination
            outcome = await self._decide(b"")
            if isinstance(outcome, Routed):
                raise Refused(400, "a request with trailers needs a body", "invalid_body")
            return [outcome]
        sent = await self._send_on(ends=False)
        return [*sent, answers.request_trailers()] if self._routed is not None else sent

    async def _send_on(self, ends: bool) -> list[Answer]:
        """The body is complete: headers, which waited for it, and the whole body again, or a word for each of its chunks."""
        body = self._taken()
        outcome = await self._decide(body)
        if not isinstance(outcome, Routed):
            return [outcome]
        if not self._duplex:
            return [answers.picked(outcome, self._wire), *answers.request_chunks(self._chunks, outcome.body)]
        sent = body if outcome.body is None else outcome.body
        return [answers.picked(outcome, self._wire), *answers.streamed_request_body(sent, ends, self._wire)]

    async def _decide(self, body: bytes) -> Routed | ProcessingResponse:
        if self._headers is None:
            raise UnsupportedMode("request_header_mode SKIP: a body came without its headers; use SEND")
        self._decided = True
        call = Call(
            headers=self._headers,
            body=body,
            subset=self._subset,
            inference_pool=self._inference_pool,
            traceparent=self._traceparent,
        )
        outcome = await self._director.route(call)
        self._let_go()
        if isinstance(outcome, Answered):
            return self._answered(outcome)
        self._routed = outcome
        cut(outcome, self._destinations)
        return outcome

    def _taken(self) -> bytes:
        """The body, which is not kept here any longer: the stream may last as long as the answer."""
        body = bytes(self._body)
        self._body.clear()
        return body

    def _let_go(self) -> None:
        self._ceiling.shrink(self._kept)
        self._kept = 0

    def _answered(self, answer: Answered) -> ProcessingResponse:
        self._decided = self.over = True
        return answers.immediate(answer)

    def _response_headers(self, message: Message) -> bytes:
        if self._routed is None:
            return self._response_alone(message)
        head = ResponseHead(headers=message.headers, served=message.served)
        sets = self._director.responded(self._routed, head)
        if self._modes.response_body not in _BUFFERING:
            return answers.response_headers(sets)
        mode = ProcessingMode.STREAMED if head.streams else ProcessingMode.NONE
        return answers.response_headers(sets, (self._modes.request_body, mode))

    def _response_body(self, message: Message) -> list[ProcessingResponse]:
        if self._response_ended:  # as with request bodies: a last chunk may be delivered twice
            return []
        self._bodies, self._response_ended = True, message.ends
        duplex = self._modes.response_body == ProcessingMode.FULL_DUPLEX_STREAMED
        return answers.response_body(message.body, message.ends, duplex)

    def _observe(self, message: Message) -> None:
        """Take in a message that needs no answer: our own Envoys report the heads of responses in this way."""
        if self._headers is None and message.kind == "response_headers":
            self._returned(message)

    def _response_alone(self, message: Message) -> bytes:
        """The answer to the response to a request of another exchange, or one that the gateway has made itself."""
        return answers.response_headers(self._returned(message))

    def _returned(self, message: Message) -> list[tuple[str, str]]:
        """Takes in the head of such a response; returns headers to add to it."""
        self.over = self._headers is None
        if message.noted is None or self._inference_pool is not None:
            return []
        return self._director.returned(message.noted, ResponseHead(headers=message.headers, served=message.served))


def hands_over(refused: Refused) -> bool:
    """Whether another process may still decide what this one has refused."""
    return refused.reason == SHUTTING_DOWN


def failure() -> Answered:
    """The answer where a mistake of ours keeps a request from being decided."""
    return answers.refusal(Refused(500, "the gateway failed to decide where this request goes", "internal_error"))


def cut(routed: Routed, destinations: int) -> None:
    """Leave no more destinations than the gateway reads."""
    del routed.endpoints[destinations:]


def _waits(modes: Modes, ends: bool) -> bool:
    """Whether the answer to the headers can wait for the body; raises `UnsupportedMode` where neither may name a destination."""
    mode = modes.request_body
    if mode == ProcessingMode.FULL_DUPLEX_STREAMED:
        return True
    if mode == ProcessingMode.BUFFERED or ends:
        return False
    if mode == ProcessingMode.STREAMED and modes.unasked:
        return True
    known = mode in ProcessingMode.BodySendMode.values()  # an open enum
    name = ProcessingMode.BodySendMode.Name(mode) if known else mode
    raise UnsupportedMode(f"request_body_mode {name}: the model is in the body; use FULL_DUPLEX_STREAMED or BUFFERED")
