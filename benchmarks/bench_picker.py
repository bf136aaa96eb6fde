"""What a request costs the picker's process in CPU, layer by layer: one process, no sockets, no Envoy.

    make bench-picker

The bytes that our own Envoy sends for one request (an exchange of headers and a body of 2 kB, one that shows the response's
head) go into the server's protocol as a transport would give them. `protocol` answers with bytes that were made before;
`messages` reads and writes the messages of ext_proc with a decision that is made already; `decision` is the whole picker at so
many replicas, with a prompt of 500 tokens that is tokenised and hashed already, with an audit log, and with tokenising, which
meets its caches; with a body of 16 kB, with a trace of its own in each call's and request's headers, and while 1,000 streams of
the same prompt are open, whose bookings count. "distinct" is all of it, tokenising included, with a prompt of its own in each
request, in Python and with the compiled parts (`make native`): a piece of this repository's pages, by the tokenizer of
`examples/models/penstock-tiny`, whose words earlier requests had, or in "unseen" no request. `h2 package` is the protocol alone
by the package of that name. Layers take turns, and the least of the rounds counts: that is what other processes disturb least.
`--shares` prints where the time of each layer goes.

"hot" is one request after the other; "cold" is with the core's caches overwritten before each read, which is what a request
finds that comes alone, on cores that do something else meanwhile (the median of its requests).
"""

import argparse
import asyncio
import contextlib
import functools
import gc
import itertools
import os
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Protocol
from unittest.mock import patch

import grpc
import h2.config
import h2.connection
import h2.events
import uvloop
from hpack import Encoder
from rich.console import Console
from rich.table import Table

from benchmarks.gatewaybench.backend import bundle
from benchmarks.gatewaybench.texts import DISTINCT, FILLER, chat_body, checkpoint, own_prompt, pages
from benchmarks.report import write_results
from benchmarks.shares import Shares
from penstock.api import headers, load_report
from penstock.api.events import BlockStored
from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.api.load_report import LoadReport
from penstock.gateway._pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, HttpHeaders, ProcessingRequest
from penstock.gateway.extproc.call import Call, Refused, ResponseHead, Routed
from penstock.gateway.extproc.service import ExtProcService
from penstock.gateway.extproc.wire import wire_of
from penstock.gateway.h2 import frames
from penstock.gateway.h2.blocks import literal
from penstock.gateway.h2.frames import END_HEADERS, END_STREAM, Setting
from penstock.gateway.h2.messages import prefixed
from penstock.gateway.h2.server import Server, ServerProtocol
from penstock.gateway.load.compiled_hasher import CompiledMemo
from penstock.gateway.load.tokenized import TokenizedPrompts, exact, extra_keys
from penstock.gateway.picker.bookings import Bookings
from penstock.gateway.picker.candidates import ReplicaKey, key_of
from penstock.gateway.picker.compiled import Compiled, installed, name_of
from penstock.gateway.picker.request import Prompt, RequestView
from penstock.gateway.process import Gateway, GatewaySettings
from penstock.gateway.xds.listener import ListenerSettings
from penstock.prompt.memo import PrefixMemo
from penstock.prompt.processor import PromptProcessor

ROUNDS, REQUESTS, TOKENS = 32, 100, 500
MAX_FRAME = 2**14
COLD_REQUESTS, READS = 12, 3  # of a request: what was left of the one before, the exchange, the head of the response
OTHERS_BYTES = 4 * 2**20
"""What others touch between two reads: more than a core's own caches hold."""
UNMEASURED, UNMEASURED_DISTINCT = 100, 1_000
"""Requests before the rounds; the compiled parts have met the pages' words after so many."""
REPLICAS = (1, 10, 100, 1000)
H2_PACKAGE = "h2 package"
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
RESPONSE = [
    (":status", "200"), ("content-type", "application/json"), ("endpoint-load-metrics", load_report.encode(REPORT, "TEXT")),
]  # fmt: skip
OPEN_STREAMS = 1_000


def body_of(words: int) -> bytes:
    """A chat completion's body, of about four bytes a word."""
    return chat_body(" ".join(f"w{n % 97}" for n in range(words)))


def unseen_words() -> bytes:
    """Twenty megabytes of words by lot."""
    return re.sub(rb"(.{6})", rb"\1 ", random.Random(0).randbytes(9_000_000).hex().encode())


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
    message = _response(picked[1].decode() if picked else "10.0.0.1:8000")
    fields = message.metadata_context.filter_metadata[headers.LOG_NAMESPACE].fields
    fields[headers.BOOKING].string_value = noted[1].decode() if noted else "0-0"
    return prefixed(message.SerializeToString())


@functools.cache
def _response(served: str) -> ProcessingRequest:
    message = _headers("response_headers", RESPONSE)
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
        """What the transport reads, up to each answer."""
        nonlocal stream, ended
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
            yield (ended, asked) if ended else (asked,)
            ended = frames.rst_stream(stream, frames.Code.NO_ERROR)
            stream += 2
            last = response(sink.written).replace(b"seq=%d" % FIRST, b"seq=%d" % (FIRST + stream))  # each says something new
            yield (frames.frame(frames.HEADERS, END_HEADERS, stream, shown) + frames.frame(frames.DATA, 0, stream, last),)
            ended += frames.rst_stream(stream, frames.Code.NO_ERROR) + frames.window_update(0, len(body) + 550)

    async def play(count: int, cold: list[float] | None = None) -> None:
        """Reads come from callbacks, outside of any task, as a transport's do."""
        done, reads = loop.create_future(), client(count)

        def on() -> None:
            data = next(reads, None)
            if data is None:
                return done.set_result(None)
            for read in data:
                if cold is None:
                    protocol.data_received(read)
                    continue
                others[:] = elsewhere
                began = time.thread_time()
                protocol.data_received(read)
                cold.append(time.thread_time() - began)
            return None

        await asyncio.sleep(0.001)  # our settings are acknowledged: what is written from now on are answers
        sink.told = lambda: loop.call_soon(on)
        loop.call_soon(on)
        await done

    return play


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


class Still:
    """Discovery of what the benchmark says itself."""

    async def watch(self) -> AsyncIterator[Fleet]:
        """Yield the fleet once it is known completely, and again after each change."""
        await asyncio.Event().wait()
        yield Fleet()


def decision(
    replicas: int,
    audit_log: Path | None = None,
    memo: PrefixMemo | None = None,
    *,
    body: bytes = BODY,
    traced: bool = False,
    distinct: bytes | None = None,
    open_streams: int = 0,
    compiled: Compiled | None = None,
) -> Play:
    """The whole picker.

    Args:
        replicas: How many there are.
        audit_log: Where it is written; what its own thread does is left out.
        memo: What tokenises; None: nothing does.
        body: That of each request.
        traced: See `through`.
        distinct: See `through`.
        compiled: What makes picks; None: Python.
        open_streams: Requests with the same prompt that run all the while.
    """
    listener = ListenerSettings(host="127.0.0.1", port=1)
    settings = GatewaySettings(name="b", host="127.0.0.1", grpc_port=0, http_port=0, listener=listener, audit_log=audit_log)
    with patch("penstock.gateway.process.installed", lambda: compiled):
        gateway = Gateway(settings, Still())
    state = gateway._follower.state
    fleet = Fleet(
        models=[Model(id="b/m", served_names=["m"])],
        pools=[Pool(id="b/m/p", model="b/m")],
        replicas=[
            Replica(uid=f"u{n}", name=f"r{n}", pool="b/m/p", host=f"10.0.{n // 250}.{n % 250 + 1}", port=8000,
                    events_port=1, replay_port=1, ready=True)
            for n in range(replicas)
        ],
    )  # fmt: skip
    state.update(fleet)
    hashes = tuple(n.to_bytes(16) for n in range(TOKENS // 16))
    everywhere = frozenset(key_of(replica) for replica in fleet.replicas)
    counted = TokenizedPrompts(prompts=(Prompt(TOKENS, hashes),), comparable=everywhere)

    async def tokenize(_: object, path: str, raw: bytes, body: Mapping[str, Any], *key: Any) -> TokenizedPrompts:
        if memo is None:
            return counted
        return TokenizedPrompts(prompts=exact(memo, path, body, extra_keys(body, *key)), comparable=everywhere)

    gateway._prompts.tokenize = tokenize  # type: ignore[method-assign] - a cost of its own, and not of a pick
    for number, replica in enumerate(fleet.replicas):
        state.event(key_of(replica), BlockStored(list(hashes[: number % len(hashes)])), 0.0)
    for replica in fleet.replicas:
        state.reported(key_of(replica), REPORT, time.monotonic())
    for number in range(open_streams):
        key = key_of(fleet.replicas[number % replicas])
        running = RequestView(id=f"open-{number}", path="", model="m", prompts=counted.prompts)
        state.bookings.responded(state.book(running, key, 0, time.monotonic()), (1, FIRST), time.monotonic())
        state.reported(key, REPORT, time.monotonic())
    server = Server(2**25, compiled=compiled)
    gateway._extproc.add_to(server)
    play = through(server, body, traced=traced, distinct=distinct)

    async def ended(count: int, cold: list[float] | None = None) -> None:
        """Nobody tells the picker here what has ended: it finds out by itself, in two looks."""
        await play(count, cold)
        for _ in range(2):
            gateway._underway.sweep(time.monotonic())

    return ended


async def measure(rounds: int, only: str, shares: Shares | None = None) -> list[dict[str, Any]]:
    """A row a layer whose name has `only` in it. `shares`: takes samples meanwhile."""
    layers: dict[str, Play] = {H2_PACKAGE: h2_package(), "protocol": protocol_alone(), "messages": messages()}
    if (which := installed()) is not None:
        layers |= {"protocol, compiled": protocol_alone(which), "messages, compiled": messages(which)}
    layers |= {f"decision, {replicas} replicas": decision(replicas) for replicas in REPLICAS}
    layers["decision, 10 replicas, audit log"] = decision(10, Path(os.devnull))
    layers["decision, 10 replicas, tokenising"] = decision(10, memo=PrefixMemo(PromptProcessor(bundle())))
    layers["decision, 10 replicas, 16 kB"] = decision(10, body=LONG_BODY)
    layers["decision, 10 replicas, 16 kB, tokenising"] = decision(10, memo=PrefixMemo(PromptProcessor(bundle())), body=LONG_BODY)
    layers["decision, 10 replicas, traceparent"] = decision(10, traced=True)
    layers["decision, 10 replicas, 1,000 open streams"] = decision(10, open_streams=OPEN_STREAMS)
    kinds = ((3, "distinct", pages()), (100, "distinct", pages()), (3, "distinct unseen", unseen_words()))
    for (replicas, kind, texts), (size, body) in itertools.product(kinds, DISTINCT.items()):
        for which in dict.fromkeys((None, installed())):
            processor = PromptProcessor(checkpoint())
            memo = PrefixMemo(processor) if which is None else CompiledMemo(processor, which)
            name = f"decision, {replicas} replicas, {size}, {kind}, {name_of(which)}"
            layers[name] = decision(replicas, memo=memo, body=body, distinct=texts, compiled=which)
    layers = {name: play for name, play in layers.items() if only in name}
    least, cold = dict.fromkeys(layers, float("inf")), {name: list[float]() for name in layers}
    for name, play in layers.items():
        await play(UNMEASURED_DISTINCT if name.split(", ")[3:4] == ["distinct"] else UNMEASURED)
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        for name, play in layers.items():
            began = time.thread_time()
            with contextlib.nullcontext() if shares is None else shares.of(name):
                await play(REQUESTS)
            least[name] = min(least[name], (time.thread_time() - began) / REQUESTS)
            if name != H2_PACKAGE:
                await play(COLD_REQUESTS, cold[name])
    rows: list[dict[str, Any]] = [{"layer": name, "cpu_us": round(1e6 * seconds, 1)} for name, seconds in least.items()]
    return [row | ({"cold_us": round(1e6 * request_s(cold[row["layer"]]), 1)} if cold[row["layer"]] else {}) for row in rows]


def request_s(reads: list[float]) -> float:
    """What a request costs, of what each of its reads does."""
    return median(sum(reads[at : at + READS]) for at in range(0, len(reads) - READS + 1, READS))


def main() -> int:
    """Prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--only", default="", help="layers whose names have this in them (default: all)")
    parser.add_argument("--shares", action="store_true", help="print where the time goes, by samples, which themselves take time")
    parser.add_argument("--no-json", action="store_true", help="write no file")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # so that all that it takes is this thread's
    shares = Shares() if arguments.shares else None
    rows = uvloop.run(measure(arguments.rounds, arguments.only, shares))
    table = Table("layer", "hot", "cold", title="What a request costs the picker, in µs of CPU")
    for row in rows:
        table.add_row(row["layer"], str(row["cpu_us"]), str(row.get("cold_us", "")))
    Console().print(table)
    if shares is not None:
        Console().print(shares.table())
    if arguments.no_json:
        return 0
    path = write_results("picker", {"rows": rows})
    Console().print(f"written to {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
