"""The bytes that our own Envoy sends for requests, as a transport would give them to the server's protocol."""

import asyncio
import functools
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol

from hpack import Encoder

from benchmarks.gatewaybench.texts import FILLER, chat_body, own_prompt
from penstock.api import headers, load_report
from penstock.api.load_report import LoadReport
from penstock.gateway._pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, HttpHeaders, ProcessingRequest
from penstock.gateway.h2 import frames
from penstock.gateway.h2.blocks import literal
from penstock.gateway.h2.frames import END_HEADERS, Setting
from penstock.gateway.h2.messages import prefixed
from penstock.gateway.h2.server import Server, ServerProtocol

MAX_FRAME = 2**14
READS = 3
"""Of a request: what was left of the one before, the exchange, the head of the response."""
OTHERS_BYTES = 4 * 2**20
"""What others touch between two reads: more than a core's own caches hold."""
DESTINATION = re.compile(rb"x-gateway-destination-endpoint.*?(10\.[0-9.]+:[0-9]+)", re.DOTALL)
NOTED = re.compile(rb"booking.*?([0-9a-f]{8}-[0-9a-f]+)", re.DOTALL)
PHASE = (headers.PHASE, headers.REQUEST_PHASE)
PATH = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
HEAD = [
    (":method", "POST"), (":scheme", "http"), (":path", PATH), (":authority", "penstock_gateway"), ("te", "trailers"),
    ("content-type", "application/grpc"), ("x-envoy-internal", "true"), ("x-forwarded-for", "10.1.1.1"),
]  # fmt: skip
REQUEST = [
    (":path", "/v1/chat/completions"), (":method", "POST"), ("content-type", "application/json"), ("content-length", "1965"),
    ("x-request-id", "5e9b7a0e-0b8e-4e0f-9d1a-6f0f6c3f2d11"),
]  # fmt: skip
FIRST = 10**9
"""Number of a replica's first report: as long as all that follow."""
REPORT = LoadReport(
    epoch=1, seq=FIRST, num_requests_running=16, max_num_seqs=256, kv_cache_usage_perc=0.3, kv_blocks_total=40_000,
    kv_blocks_reclaimable=28_000, prefill_backlog_tokens=400, prefill_tokens_per_s=50_000.0, decode_step_s=0.01,
)  # fmt: skip
SAID = load_report.encode(REPORT, "TEXT")
RESPONSE = [(":status", "200"), ("content-type", "application/json")]


def body_of(words: int) -> bytes:
    """A chat completion's body, of about four bytes a word."""
    return chat_body(" ".join(f"w{n % 97}" for n in range(words)))


BODY, LONG_BODY = body_of(508), body_of(4_208)


class Play(Protocol):
    """Plays requests."""

    def __call__(self, count: int, cold: list[float] | None = None) -> Awaitable[None]:
        """Plays so many; `cold` is for the CPU seconds of each read, before which the core's caches are overwritten."""
        ...


def said(body: bytes = BODY, trace: str = "") -> tuple[bytes, bytes]:
    """The two messages of a request, as Envoy frames them."""
    traced = [("traceparent", trace)] if trace else []
    first = _headers("request_headers", [*REQUEST, *traced])
    first.protocol_config.request_body_mode = ProcessingMode.FULL_DUPLEX_STREAMED
    second = ProcessingRequest(request_body=HttpBody(body=body, end_of_stream=True))
    one, two = (prefixed(message.SerializeToString()) for message in (first, second))
    return one, two


def trace_of(number: int) -> str:
    """The `traceparent` of one call."""
    return f"00-{number:032x}-{number:016x}-01"


def response(written: bytes) -> bytes:
    """The one that shows the response's head, after the picker has written its answers: from the replica that it has picked."""
    picked, noted = DESTINATION.search(written), NOTED.search(written)
    return shown(picked[1].decode() if picked else "10.0.0.1:8000", noted[1].decode() if noted else "0-0")


def shown(served: str, booking: str, report: str = SAID) -> bytes:
    """The message that shows the head of the response which `served` has given."""
    message = _response(served, report)
    message.metadata_context.filter_metadata[headers.LOG_NAMESPACE].fields[headers.BOOKING].string_value = booking
    return prefixed(message.SerializeToString())


@functools.cache
def _response(served: str, report: str) -> ProcessingRequest:
    message = _headers("response_headers", [*RESPONSE, (headers.LOAD, report)])
    message.observability_mode = True
    message.metadata_context.filter_metadata[headers.LOG_NAMESPACE].update({"model": "b/m", headers.NAME: "m"})
    message.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": served})
    return message


def _headers(kind: str, fields: list[tuple[str, str]]) -> ProcessingRequest:
    message = ProcessingRequest(**{kind: HttpHeaders()})  # type: ignore[arg-type]
    for name, value in fields:
        getattr(message, kind).headers.headers.add(key=name, raw_value=value.encode())
    return message


def data_frames(stream: int, data: bytes) -> bytes:
    """DATA frames of the size that a peer takes without being asked."""
    return b"".join(frames.frame(frames.DATA, 0, stream, data[at : at + MAX_FRAME]) for at in range(0, len(data), MAX_FRAME))


class Sink(asyncio.Transport):
    """A transport that says when it is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.told: Callable[[], object] = lambda: None
        self.written = b""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return details of the connection."""
        return ("127.0.0.1", 1) if name == "peername" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes."""
        self.written = bytes(data)
        self.told()

    def is_closing(self) -> bool:
        """Return whether it is closing."""
        return False


def through(server: Server, body: bytes = BODY, *, traced: bool = False, distinct: bytes | None = None) -> Play:
    """Requests through our own HTTP/2 into a service.

    Args:
        server: The server.
        body: That of each request.
        traced: Each call, and each request, has a trace of its own.
        distinct: What each request takes a prompt of its own from, in place of the body's `FILLER`; None: all have the body's.
    """
    loop, sink, protocol = asyncio.get_running_loop(), Sink(), ServerProtocol(server)
    first_trace = trace_of(0) if traced else ""
    parts = said(body, first_trace)
    filler = FILLER * body.count(FILLER)
    protocol.connection_made(sink)
    assert protocol._timer is not None
    protocol._timer.cancel()  # it would ping a connection, and end it, whose turn does not come for long
    encoder = Encoder()
    encoder.header_table_size = 0
    first, usual, showing = encoder.encode([*HEAD, PHASE]), encoder.encode([*HEAD, PHASE]), encoder.encode(HEAD)
    ours = frames.settings({Setting.INITIAL_WINDOW_SIZE: 2**28})
    protocol.data_received(frames.PREFACE + ours + frames.window_update(0, 2**30))
    stream, ended = -1, b""
    elsewhere, others = bytearray(OTHERS_BYTES), bytearray(OTHERS_BYTES)

    def client(count: int) -> Iterator[tuple[bytes, ...]]:
        """What the transport reads, up to each answer that somebody waits for; and the rest."""
        nonlocal stream, ended
        shown_before: tuple[bytes, ...] = ()
        for n in range(count):
            stream += 2
            block = usual if n else first
            asking, shown = parts[0], showing
            if traced:
                asking = asking.replace(first_trace.encode(), trace_of(stream).encode())
                block += literal("traceparent", trace_of(stream))
                shown += literal("traceparent", trace_of(stream))
            head = frames.frame(frames.HEADERS, END_HEADERS, stream, block) + frames.frame(0, 0, stream, asking)
            said_now = parts[1] if distinct is None else parts[1].replace(filler, own_prompt(distinct, stream, len(filler)))
            asked = head + data_frames(stream, said_now)
            yield (*shown_before, ended, asked) if ended else (asked,)
            ended = frames.rst_stream(stream, frames.Code.NO_ERROR)
            stream += 2
            last = response(sink.written).replace(b"seq=%d" % FIRST, b"seq=%d" % (FIRST + stream))  # each says something new
            shown_before = (
                frames.frame(frames.HEADERS, END_HEADERS, stream, shown) + frames.frame(frames.DATA, 0, stream, last),
            )
            ended += frames.rst_stream(stream, frames.Code.NO_ERROR) + frames.window_update(0, len(body) + 550)
        yield shown_before

    async def play(count: int, cold: list[float] | None = None) -> None:
        """Reads come from callbacks, outside of any task, as a transport's do."""
        done, waits = loop.create_future(), False
        reads = enumerate(client(count))

        def on() -> None:
            nonlocal waits
            number, data = next(reads)
            for read in data:
                waits = number < count and read is data[-1]
                if cold is None:
                    protocol.data_received(read)
                    continue
                others[:] = elsewhere
                began = time.thread_time()
                protocol.data_received(read)
                cold.append(time.thread_time() - began)
            if number == count:
                done.set_result(None)

        def told() -> None:
            nonlocal waits
            if waits:  # else it is nothing that the proxy has to have to go on
                waits = False
                loop.call_soon(on)

        await asyncio.sleep(0.001)  # our settings are acknowledged: what is written from now on are answers
        sink.told = told
        loop.call_soon(on)
        await done

    return play
