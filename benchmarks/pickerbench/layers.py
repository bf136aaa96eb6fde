"""Layers of the picker alone: HTTP/2, and the messages of ext_proc with a decision that is made already."""

from collections.abc import Mapping
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events
from hpack import Encoder

from benchmarks.pickerbench.proxy import BODY, HEAD, PATH, PHASE, Play, response, said, through
from penstock.gateway.extproc.call import Call, Refused, ResponseHead, Routed
from penstock.gateway.extproc.service import ExtProcService
from penstock.gateway.extproc.wire import wire_of
from penstock.gateway.h2 import frames
from penstock.gateway.h2.frames import END_HEADERS, END_STREAM, Setting
from penstock.gateway.h2.server import Server
from penstock.gateway.picker.bookings import Bookings
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.compiled import Compiled


def protocol_alone(compiled: Compiled | None = None) -> Play:
    """The bytes of the answers, made before."""
    answers = [bytes(420), bytes(len(BODY) + 20)]

    async def process(_: Any, context: Any) -> None:
        await context.read()
        if PHASE in context.invocation_metadata():
            await context.read()
            await context.write(answers[0])
            await context.write(answers[1])

    server = Server(2**25, compiled=compiled)
    handlers = {"Process": grpc.stream_stream_rpc_method_handler(process, bytes, bytes)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(PATH.split("/")[1], handlers),))
    return through(server)


def h2_package() -> Play:
    """The same by the `h2` package: only HTTP/2, no gRPC, no tasks."""
    peer = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
    parts, answers, shown = said(), [bytes(425), bytes(len(BODY) + 25)], response(b"")
    encoder = Encoder()
    peer.initiate_connection()
    stream = -1
    ours = frames.settings({Setting.INITIAL_WINDOW_SIZE: 2**28})
    peer.receive_data(frames.PREFACE + ours + frames.window_update(0, 2**30))

    async def play(count: int, cold: list[float] | None = None) -> None:
        nonlocal stream
        for _ in range(count):
            stream += 2
            block = encoder.encode(HEAD)
            first = frames.frame(frames.HEADERS, END_HEADERS, stream, block) + frames.frame(0, 0, stream, parts[0])
            _feed(peer, first, stream)
            _feed(peer, frames.frame(frames.DATA, 0, stream, parts[1]), stream)
            peer.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc")])
            peer.send_data(stream, answers[0])
            peer.send_data(stream, answers[1])
            peer.send_headers(stream, [("grpc-status", "0")], end_stream=True)
            peer.data_to_send()
            _feed(peer, frames.frame(frames.DATA, END_STREAM, stream), stream)
            stream += 2
            _feed(peer, frames.frame(frames.HEADERS, END_HEADERS, stream, block), stream)
            _feed(peer, frames.frame(frames.DATA, END_STREAM, stream, shown) + frames.window_update(0, 2_500), stream)
            peer.send_headers(stream, [(":status", "200"), ("grpc-status", "0")], end_stream=True)
            peer.data_to_send()

    return play


def _feed(peer: h2.connection.H2Connection, data: bytes, stream: int) -> None:
    for event in peer.receive_data(data):
        if isinstance(event, h2.events.DataReceived) and event.flow_controlled_length:
            peer.acknowledge_received_data(event.flow_controlled_length, stream)


class Decided:
    """A director that has decided already."""

    usual_heads = at_once = None

    def __init__(self) -> None:
        booking = Bookings().book("r", ReplicaKey("u", 8000), 1, 0.0)
        endpoints = [f"10.0.0.{n}:8000" for n in range(1, 5)]
        self._routed = Routed(endpoints=endpoints, pool="b/m/p", booking=booking, model="b/m", name="m", came=0.0)

    def preview(self, call: Call) -> None:
        """Looks at the head of a request; raises `Refused` where no body could save it."""

    async def route(self, call: Call) -> Routed:
        """Choose the destination of a complete request."""
        return self._routed

    def responded(self, routed: Routed, head: ResponseHead) -> list[tuple[str, str]]:
        """Takes in the head of the response; returns headers to add to it."""
        return [("x-penstock-replica", "u"), ("x-penstock-model", "m")]

    def returned(self, noted: Mapping[str, str], head: ResponseHead) -> list[tuple[str, str]]:
        """As `responded`, for an exchange that saw only the response."""
        return []

    def passed_on(self, routed: Routed) -> None:
        """The exchange is over, and the request has gone to its replica; `returned` will show the response."""

    def ended(self, routed: Routed) -> None:
        """The whole response has passed: only gateways that send response bodies show that."""

    def closed(self, routed: Routed) -> None:
        """The exchange is over."""

    def refused(self, call: Call, refused: Refused) -> None:
        """Record that the request was answered with an error, by the gateway or the director."""


def messages(compiled: Compiled | None = None) -> Play:
    """ext_proc's messages, without a decision."""
    server = Server(2**25, compiled=compiled)
    ExtProcService(Decided(), wire=wire_of(compiled)).add_to(server)
    return through(server)
