"""A peer that says to a `Connection` whatever a test wants, and reads what it says. Connections are of both forms, where the
compiled parts are built (`make native`)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, NamedTuple

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from hpack import Decoder, Encoder

from penstock.gateway.h2 import frames
from penstock.gateway.h2.forms import Connect, connect_by
from penstock.gateway.h2.frames import Code
from penstock.gateway.h2.server import Server
from penstock.gateway.h2.stream import Stream
from penstock.gateway.picker.compiled import Compiled

HEAD = [
    (":method", "POST"), (":scheme", "http"), (":path", "/a.B/C"), (":authority", "x"),
    ("content-type", "application/grpc"), ("te", "trailers"),
]  # fmt: skip


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def number(self) -> int:
        """What RST_STREAM and WINDOW_UPDATE say."""
        return int.from_bytes(self.payload)


class Notes:
    """A receiver that notes what it hears."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.received = bytearray()
        self.ended = 0
        self.sent_all = 0
        self.resets: list[Code] = []

    def data(self, data: bytes) -> None:
        assert data
        assert not self.ended
        assert not self.resets
        self.received += data

    def end(self) -> None:
        self.ended += 1

    def reset(self, code: Code) -> None:
        self.resets.append(code)

    def sent(self) -> None:
        self.sent_all += 1


class Pair:
    """A connection and its peer."""

    def __init__(self, connect: Connect, *, greet: bool = True, refuse: bool = False) -> None:
        self.now = 100.0
        self.notes: list[Notes] = []
        self.refuse = refuse
        self.connection = connect(self._accept, self.now)
        self.encoder, self.decoder = Encoder(), Decoder()
        self.encoder.header_table_size = 0
        self._usual = b""
        if greet:
            self.say(frames.PREFACE, frames.settings({}))
            self.heard()

    def _accept(self, stream: Stream) -> Notes | None:
        if self.refuse:
            return None
        self.notes.append(Notes(stream))
        return self.notes[-1]

    def say(self, *parts: bytes) -> None:
        self.connection.receive(b"".join(parts), self.now)

    def heard(self) -> list[Frame]:
        """What the connection has said since the last time."""
        data = self.connection.take()
        self.connection.flushed()
        return parse(data + self.connection.take())

    def block(self, fields: list[tuple[str, str]] = HEAD) -> bytes:
        if fields is HEAD and self._usual:
            return self._usual
        block = self.encoder.encode(fields)
        if fields is HEAD and not self.encoder.header_table_size:
            self._usual = self.encoder.encode(fields)  # without the update of the table's size that begins the first
        return block

    def request(self, stream: int = 1, *, ends: bool = False, fields: list[tuple[str, str]] = HEAD) -> bytes:
        flags = frames.END_HEADERS | (frames.END_STREAM if ends else 0)
        return frames.frame(frames.HEADERS, flags, stream, self.block(fields))

    def opened(self, stream: int = 1) -> Notes:
        self.say(self.request(stream))
        assert not self.connection.closed, self.connection.fault
        return self.notes[-1]

    def reset_with(self) -> list[tuple[int, int]]:
        """(stream, code) of the RST_STREAMs said."""
        return [(it.stream, it.number) for it in self.heard() if it.kind == frames.RST_STREAM]

    def died_of(self) -> Code | None:
        """The code of the last GOAWAY; None while the connection lives."""
        last = self.heard()[-1:]
        if not self.connection.closed:
            return None
        assert last
        assert last[0].kind == frames.GOAWAY
        assert not self.connection.streams
        return Code(int.from_bytes(last[0].payload[4:8]))


def parse(data: bytes) -> list[Frame]:
    """Whole frames, and nothing else."""
    result, at = [], 0
    while at < len(data):
        high, low, kind, flags, stream = frames.HEAD.unpack_from(data, at)
        end = at + frames.HEAD_BYTES + (high << 8 | low)
        assert end <= len(data), "a frame that is cut off"
        result.append(Frame(kind, flags, stream, data[at + frames.HEAD_BYTES : end]))
        at = end
    return result


def data(payload: bytes, stream: int = 1, *, ends: bool = False, flags: int = 0) -> bytes:
    return frames.frame(frames.DATA, flags | (frames.END_STREAM if ends else 0), stream, payload)


@pytest.fixture
def connect(compiled: Compiled | None) -> Connect:
    return connect_by(compiled)


@pytest.fixture
def make_pair(connect: Connect) -> Callable[..., Any]:
    return partial(Pair, connect)


@pytest.fixture
def pair(make_pair: Callable[..., Any]) -> Pair:
    return make_pair()


@pytest.fixture(name="data")
def data_fixture() -> Callable[..., bytes]:
    return data


@pytest.fixture(name="parse")
def parse_fixture() -> Callable[[bytes], list[Frame]]:
    return parse


@pytest.fixture(scope="session")
def head_fields() -> list[tuple[str, str]]:
    return HEAD


class Lean:
    """A server with a service of each kind of call, and a grpc.aio channel to it."""

    def __init__(self, server: Server, port: int, channel: grpc.aio.Channel, seen: "Service") -> None:
        self.server, self.port, self.channel, self.seen = server, port, channel, seen
        self.block = Encoder().encode([*HEAD[:2], (":path", "/test.Echo/Both"), *HEAD[3:]])

    async def ask(self, messages: list[bytes]) -> list[bytes]:
        """Sends messages and returns those that come back."""
        call = self.channel.stream_stream("/test.Echo/Both")(iter(messages))
        return [message async for message in call]


class Service:
    """Echoes; `hold` waits for ever and notes its end."""

    def __init__(self) -> None:
        self.held = 0
        self.cancelled = 0

    async def both(self, _: Any, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            if message == b"fail":
                raise ValueError("secret")
            if message == b"abort":
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "as asked: ä\n%")
            await context.write(message)

    async def generate(self, request: bytes, _: Any) -> Any:
        for n in range(int(request)):
            yield b"%d" % n

    async def collect(self, requests: Any, _: Any) -> bytes:
        return b"".join([message async for message in requests])

    async def one(self, request: bytes, context: Any) -> bytes:
        return request + dict(context.invocation_metadata()).get("word", "").encode()

    async def hold(self, _: Any, context: Any) -> None:
        self.held += 1
        try:
            await context.read()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.held -= 1

    async def flood(self, request: bytes, context: Any) -> None:
        for _ in range(int(request)):
            await context.write(bytes(60_000))

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        return {
            "Both": grpc.stream_stream_rpc_method_handler(self.both, bytes, bytes),
            "Generate": grpc.unary_stream_rpc_method_handler(self.generate, bytes, bytes),
            "Collect": grpc.stream_unary_rpc_method_handler(self.collect, bytes, bytes),
            "One": grpc.unary_unary_rpc_method_handler(self.one, bytes, bytes),
            "Hold": grpc.stream_stream_rpc_method_handler(self.hold, bytes, bytes),
            "Flood": grpc.unary_stream_rpc_method_handler(self.flood, bytes, bytes),
            "Strict": grpc.unary_unary_rpc_method_handler(self.one, HealthCheckRequest.FromString, bytes),
        }


@contextlib.asynccontextmanager
async def serving_lean(**changes: Any) -> AsyncIterator[Lean]:
    server, service = Server(**{"max_message_bytes": 1_000_000, **changes}), Service()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", service.handlers()),))
    port = await server.bind("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Lean(server, port, channel, service)
    await server.stop(0.1)


@pytest.fixture
def lean_server(compiled: Compiled | None) -> Callable[..., Any]:
    return partial(serving_lean, compiled=compiled)
