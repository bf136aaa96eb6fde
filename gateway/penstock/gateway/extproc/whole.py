"""The usual exchanges, which the compiled connection takes in and answers itself: here they are decided, in one call for each.

Usual is a request of our own Envoy that comes in full duplex, with a body and without trailers, of which one message goes on, and
the head of a response that is only shown. What else an exchange can be goes to a `Call` and an `Exchange`, with all bytes that
have come, as if they had been asked from the start. Those two are the statement; tests hold this against them.
"""

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import grpc

from penstock.api import headers
from penstock.api.tracing import TRACEPARENT
from penstock.gateway.extproc import answers
from penstock.gateway.extproc.call import Answered, Call, Refused, ResponseHead, Routed
from penstock.gateway.extproc.ceiling import Ceiling
from penstock.gateway.extproc.exchange import Director, cut, failure, hands_over
from penstock.gateway.extproc.wire import CompiledWire
from penstock.gateway.h2.frames import Code
from penstock.gateway.h2.messages import OK, OK_ALONE, RESPONSE_HEAD, trailers
from penstock.gateway.h2.server import ServerProtocol
from penstock.gateway.h2.stream import Stream
from penstock.gateway.h2.worker import Worker
from penstock.gateway.picker.compiled import Compiled

MOST_BYTES = answers.CHUNK_BYTES
"""Of a request's messages: so its body goes on in one, and no answer waits for a caller that does not read."""

log = logging.getLogger(__name__)


class Service(Protocol):
    """The service whose exchanges they are."""

    open: int
    director: Director
    ceiling: Ceiling
    destinations: int
    traced: bool


class WholeExchanges:
    """See `penstock.gateway.h2.server.Shortcut`.

    Args:
        service: Whose they are.
        path: Of its method.
        compiled: What takes them in.
        wire: Reads their messages.
    """

    def __init__(self, service: Service, path: str, compiled: Compiled, wire: CompiledWire) -> None:
        phase = headers.PHASE, headers.REQUEST_PHASE
        self._service = service
        self.exchanges = compiled.Exchanges(
            *(path, phase, wire.compiled, MOST_BYTES, answers.CHUNK_BYTES, RESPONSE_HEAD, OK, OK_ALONE, answers.USUAL),
            service.director.usual_heads,
        )

    def taker(self, peer: ServerProtocol) -> "Taker":
        """Who hears of those of a connection."""
        return Taker(self._service, peer)


class Place:
    """What a request takes of the process until it is answered. While more of it is to come it receives the stream."""

    __slots__ = ("_bytes", "_entered", "_peer", "_service")

    def __init__(self, service: Service, peer: ServerProtocol) -> None:
        self._service, self._peer = service, peer
        self._entered, self._bytes = False, 0
        service.open += 1
        peer.server.calls += 1

    def hold(self, size: int) -> None:
        """So many bytes of the body are kept now; raises `Refused` where all requests together keep too much."""
        ceiling = self._service.ceiling
        if not self._entered:
            ceiling.enter()
            self._entered = True
        ceiling.grow(size - self._bytes)
        self._bytes = size

    def grew(self, size: int) -> bool:
        """As `hold`; whether there is room."""
        try:
            self.hold(size)
        except Refused:
            return False
        return True

    def close(self) -> None:
        """The request is answered, gone, or a call's."""
        if self._entered:
            self._service.ceiling.leave(self._bytes)
        self._service.open -= 1
        self._peer.server.left()

    def reset(self, code: Code) -> None:
        """The stream is gone."""
        self.close()

    def end(self) -> None:
        """The peer has sent all: the connection knows."""

    def sent(self) -> None:
        """Nothing was to be sent."""


class Asked(Worker):
    """A request that is being decided; receives its stream."""

    __slots__ = ()

    def data(self, data: bytes) -> None:
        """What comes after a request is not read."""

    def end(self) -> None:
        """The peer has sent all."""

    def reset(self, code: Code) -> None:
        """The stream is gone."""
        self.cancel()

    def sent(self) -> None:
        """All that was to be sent is on its way."""


class Taker:
    """Hears of the exchanges of one connection."""

    __slots__ = ("_peer", "_service")

    def __init__(self, service: Service, peer: ServerProtocol) -> None:
        self._service, self._peer = service, peer

    def begun(self, fields: dict[str, str], size: int) -> Place | None:
        """The head of a request has come and `size` bytes of its body, and nothing more for now; returns what receives the
        stream. None: a call has to take it."""
        server = self._peer.server
        if server.calls >= server.max_calls:
            return None
        place = Place(self._service, self._peer)
        try:
            place.hold(size)
            self._service.director.preview(Call(headers=fields))
        except Refused:  # as the call will find, and say
            place.close()
            return None
        return place

    def request(self, stream: Stream, fields: dict[str, str], body: bytes, place: Place | None) -> Asked | None:
        """A request has come; returns what receives its stream. None: it is answered."""
        service, begun = self._service, place is not None
        if (at_once := service.director.at_once) is not None and service.ceiling.has_room(len(body)):
            try:
                routed = at_once(fields, body)
            except Exception:
                log.exception("a request could not be decided")
                return self._answered(stream, failure(), place)
            if routed is not None:
                return self._sent_on(stream, routed, body, place)
        place = place or Place(service, self._peer)
        call = Call(headers=fields, body=body, traceparent=stream.head.get(TRACEPARENT) if service.traced else None)
        return Asked(self._decide(stream, call, place, begun=begun), self._peer.step_soon, place.close)

    def response(self, noted: Mapping[str, str], fields: dict[str, str], served: str | None) -> bytes | None:
        """The head of a response has come that is not one of `Director.usual_heads`, and what was noted of its request; returns
        the answer, if there is one."""
        try:
            self._service.director.returned(noted, ResponseHead(headers=fields, served=served))
        except Exception:
            log.exception("the head of a response could not be taken in")
            return answers.immediate(failure()).SerializeToString()
        return None

    async def _decide(self, stream: Stream, call: Call, place: Place, *, begun: bool) -> None:
        service, connection = self._service, self._peer.connection
        try:
            place.hold(len(call.body))
            if not begun:  # else its head was looked at when that came
                service.director.preview(call)
            outcome = await service.director.route(call)
        except Refused as refused:
            if hands_over(refused):
                connection.end(stream, trailers(grpc.StatusCode.UNAVAILABLE, str(refused), alone=True))
                return self._peer.flush_soon()
            service.director.refused(call, refused)
            outcome = answers.refusal(refused)
        except Exception:
            log.exception("a request could not be decided")
            outcome = failure()
        if isinstance(outcome, Answered):
            return self._answered(stream, outcome)
        return self._sent_on(stream, outcome, call.body)

    def _answered(self, stream: Stream, outcome: Answered, place: Place | None = None) -> None:
        """The gateway answers itself. `place`: what the request has taken and gives back here."""
        connection = self._peer.connection
        connection.message(stream, RESPONSE_HEAD, answers.immediate(outcome).SerializeToString())
        connection.end(stream, OK)
        self._done(place)

    def _sent_on(self, stream: Stream, routed: Routed, body: bytes, place: Place | None = None) -> None:
        """The request goes to its replica, with its body if it gets no other one. `place`: as in `_answered`."""
        self._service.director.passed_on(routed)
        sent: Any = self._peer.connection  # of the compiled kind
        body = body if routed.body is None else routed.body
        cut(routed, self._service.destinations)
        if routed.usual:
            sent.usual(stream, ",".join(routed.endpoints), routed.pool, routed.notes, body)
        else:
            sent.routed(stream, *answers.pick(routed), body)
        routed.choice = None
        self._done(place)

    def _done(self, place: Place | None) -> None:
        if place is not None:
            place.close()
        self._peer.flush_soon()
