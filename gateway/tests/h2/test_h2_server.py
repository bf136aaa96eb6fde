"""The server on a real socket: gRPC as grpc's own client sees it, and HTTP/2 as another implementation does."""

import asyncio
import gc
import gzip
import socket
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events
import pytest
import uvloop
from hpack import Encoder

from penstock.gateway.h2 import frames, limits
from penstock.gateway.h2.call import HIGH_WATER_BYTES
from penstock.gateway.h2.messages import prefixed
from penstock.gateway.h2.server import Server, ServerProtocol


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def packed(message: bytes) -> bytes:
    """A compressed message as it goes over the wire."""
    return b"\1" + prefixed(message)[1:]


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    return await call.code(), await call.details()


async def test_all_four_kinds_of_call(lean_server: Any) -> None:
    async with lean_server() as it:
        assert await it.ask([]) == []
        assert await it.ask([b"", b"a", bytes(999_000), b"b"]) == [b"", b"a", bytes(999_000), b"b"]
        generated = it.channel.unary_stream("/test.Echo/Generate")(b"3")
        assert [message async for message in generated] == [b"0", b"1", b"2"]
        assert await it.channel.stream_unary("/test.Echo/Collect")(iter([b"a", b"b"])) == b"ab"
        assert await it.channel.unary_unary("/test.Echo/One")(b"a", metadata=[("word", "z")]) == b"az"
        assert (it.server.calls, it.server.unread) == (0, 0)


@pytest.mark.parametrize(
    ("message", "code", "details"),
    [
        (b"abort", grpc.StatusCode.FAILED_PRECONDITION, "as asked: ä\n%"),
        (b"fail", grpc.StatusCode.UNKNOWN, "ValueError"),
        (bytes(1_000_001), grpc.StatusCode.RESOURCE_EXHAUSTED, "a message of 1000001 bytes; 1000000 are taken"),
    ],
)
@pytest.mark.parametrize("before", [[], [b"answered"]])
async def test_how_calls_fail(lean_server: Any, message: bytes, code: grpc.StatusCode, details: str, before: list[bytes]) -> None:
    async with lean_server() as it:
        call = it.channel.stream_stream("/test.Echo/Both")(iter([*before, message]))
        with pytest.raises(grpc.aio.AioRpcError):
            assert await call.read() == b"answered"
            await call.read()
        assert await status_of(call) == (code, details)
        assert (it.server.calls, it.server.unread) == (0, 0)
        assert await it.ask([b"next"]) == [b"next"]


async def test_unknown_methods_and_unreadable_messages(lean_server: Any) -> None:
    async with lean_server() as it:
        call = it.channel.unary_unary("/test.Echo/Nothing")(b"")
        assert await status_of(call) == (grpc.StatusCode.UNIMPLEMENTED, "/test.Echo/Nothing does not exist")
        code, details = await status_of(it.channel.unary_unary("/test.Echo/Strict")(b"\xff"))
        assert code == grpc.StatusCode.INTERNAL
        assert details.startswith("the message is unreadable")


async def test_a_call_that_the_caller_gives_up_is_cancelled(lean_server: Any) -> None:
    async with lean_server() as it:
        calls = [it.channel.stream_stream("/test.Echo/Hold")() for _ in range(20)]
        for call in calls:
            await call.write(b"x")
        await until(lambda: it.seen.held == 20)
        for call in calls[:5]:
            call.cancel()
        await until(lambda: it.seen.held == 15)
        assert (it.seen.cancelled, it.server.calls) == (5, 15)
        await it.channel.close()
        await until(lambda: it.seen.held == 0)
        assert (it.seen.cancelled, it.server.calls, it.server.unread) == (20, 0, 0)


async def test_the_callers_deadline_holds_here_too(lean_server: Any) -> None:
    async with lean_server() as it:
        client = await Http2.connect(it.port)
        client.request("/test.Echo/Hold", ("grpc-timeout", "50m"))
        assert (await client.answer())["grpc-status"] == "4"
        assert it.seen.cancelled == 1
        client.request("/test.Echo/Hold", ("grpc-timeout", "soon"))
        assert (await client.answer())["grpc-status"] == "13"
        client.close()


async def test_compressed_and_incomplete_messages(lean_server: Any) -> None:
    async with lean_server() as it:
        client = await Http2.connect(it.port)
        for body, encoding, status in (
            (b"\1\0\0\0\1x", "zstd", "12"),
            (b"\1\0\0\0\1x", "gzip", "13"),
            (packed(gzip.compress(b"cut")[:-1]), "gzip", "13"),
            (packed(gzip.compress(bytes(1_000_001))), "gzip", "8"),
            (b"\1\0\0\0\1x", "identity", "13"),
            (b"\1\0\0\0\1x", "", "13"),  # nobody says how
            (b"\2\0\0\0\1x", "gzip", "13"),
            (b"\0\0\0\0\5x", "", "13"),
            (prefixed(b"whole") + b"\0\0", "", "13"),
        ):
            client.request("/test.Echo/One", *([("grpc-encoding", encoding)] if encoding else []), body=body)
            answer = await client.answer()
            assert (answer["grpc-status"], answer["grpc-accept-encoding"]) == (status, "identity, deflate, gzip")
        for encoding, compress in (("gzip", gzip.compress), ("deflate", zlib.compress)):
            for large in (b"x", bytes(1_000_000)):
                client.request("/test.Echo/One", ("grpc-encoding", encoding), body=packed(compress(large)))
                assert (await client.answer())["body"] == prefixed(large)
        client.request("/test.Echo/One", ("grpc-encoding", "gzip"), body=prefixed(b"plain"))  # as small messages are sent
        assert (await client.answer())["body"] == prefixed(b"plain")
        client.close()
        await until(lambda: not it.server.calls)
        assert it.server.unread == 0


async def test_what_is_no_grpc_is_told_so_in_http(lean_server: Any) -> None:
    async with lean_server() as it:
        client = await Http2.connect(it.port)
        client.request("/test.Echo/One", method="GET")
        assert (await client.answer())[":status"] == "405"
        client.request("/test.Echo/One", kind="text/html", body=b"x")
        assert (await client.answer())[":status"] == "415"
        client.request("/test.Echo/One", kind="application/grpc+proto", body=prefixed(b"x"))
        assert await client.answer() == {
            ":status": "200",
            "content-type": "application/grpc",
            "grpc-accept-encoding": "identity, deflate, gzip",
            "grpc-status": "0",
            "body": prefixed(b"x"),
        }
        client.close()


@pytest.mark.parametrize(
    ("path", "more", "kind", "says"),
    [
        ("/test.Echo/Nothing", (), "application/grpc", ("grpc-status", "12")),
        ("/test.Echo/Both", (("grpc-timeout", "soon"),), "application/grpc", ("grpc-status", "13")),
        ("/test.Echo/Both", (), "text/html", (":status", "415")),
    ],
)
async def test_what_no_message_could_change_is_answered_before_there_is_one(
    lean_server: Any, path: str, more: tuple[tuple[str, str], ...], kind: str, says: tuple[str, str]
) -> None:
    async with lean_server() as it:
        client = await Http2.connect(it.port)
        client.request(path, *more, kind=kind, ends=False)
        assert says in (await client.answer()).items()
        client.request("/test.Echo/One", body=prefixed(b"x"))
        assert (await client.answer())["body"] == prefixed(b"x")
        client.close()


async def test_who_writes_waits_for_a_caller_that_does_not_read(lean_server: Any) -> None:
    async with lean_server() as it:
        client = await Http2.connect(it.port, acknowledge=False)
        client.request("/test.Echo/Flood", body=prefixed(b"50"))
        (peer,) = it.server.peers
        await until(lambda: peer.connection.unsent)
        for _ in range(20):
            await asyncio.sleep(0.005)
            assert peer.connection.unsent <= HIGH_WATER_BYTES + 60_005
        client.acknowledge = True
        client.connection.increment_flow_control_window(2**24)
        client.connection.increment_flow_control_window(2**24, 1)
        client.flush()
        answer = await client.answer()
        assert (len(answer["body"]), answer["grpc-status"]) == (50 * 60_005, "0")
        client.close()


async def test_a_caller_whose_call_does_not_read_is_held_by_its_window(lean_server: Any) -> None:
    async with lean_server() as it:
        client = await Http2.connect(it.port)
        client.request("/test.Echo/Hold", body=prefixed(b"first"), ends=False)
        await until(lambda: it.seen.held)
        sent = 0
        while (room := client.connection.local_flow_control_window(1)) > 20_000 or sent < limits.STREAM_WINDOW:
            if room < 20_000:
                break
            client.send(prefixed(bytes(10_000)))
            sent += 10_005
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0.01)
            client.pump()
        assert client.connection.local_flow_control_window(1) < 20_000
        assert sent <= 2 * limits.STREAM_WINDOW
        client.close()
        await until(lambda: not it.server.calls and not it.server.unread)


async def test_too_much_unread_ends_the_call_that_sends_it(lean_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_UNREAD_BYTES", 50_000)
    async with lean_server() as it:
        client = await Http2.connect(it.port)
        client.request("/test.Echo/Hold", body=prefixed(b"x") + prefixed(bytes(40_000)) + prefixed(bytes(20_000)), ends=False)
        assert (await client.answer())["grpc-status"] == "8"
        await until(lambda: not it.server.calls)
        assert it.server.unread == 0
        assert await it.ask([b"x"]) == [b"x"]
        client.close()


async def test_what_comes_after_a_calls_end_is_not_kept(lean_server: Any) -> None:
    """The service has ended, and its last words wait for a caller that gives no window and goes on sending."""
    async with lean_server() as it:
        client = await Http2.connect(it.port, acknowledge=False)
        client.request("/test.Echo/Flood", body=prefixed(b"2"), ends=False)
        (peer,) = it.server.peers
        await until(lambda: peer.connection.unsent and not it.server.calls)
        client.send(prefixed(bytes(40_000)))
        client.send(b"no message")
        await until(lambda: peer.connection.receive_window <= limits.CONNECTION_WINDOW - 40_000)
        assert it.server.unread == 0
        client.close()
        await until(lambda: not it.server.peers)
        assert it.server.unread == 0


async def test_more_calls_than_are_taken_are_refused(lean_server: Any) -> None:
    async with lean_server(max_calls=2) as it:
        client = await Http2.connect(it.port)
        for _ in range(2):
            client.request("/test.Echo/Hold", ends=False)
        client.request("/test.Echo/Hold", ends=False)
        assert (await client.answer())["reset"] == frames.Code.REFUSED_STREAM
        assert it.server.calls == 2
        client.close()


async def test_stopping_says_goodbye_and_ends_what_runs_on(lean_server: Any) -> None:
    async with lean_server() as it:
        client = await Http2.connect(it.port)
        client.request("/test.Echo/Hold", ends=False)
        await until(lambda: it.seen.held)
        await it.server.stop(0.05)
        assert (it.seen.held, it.server.calls, it.server.peers) == (0, 0, set())
        client.pump()
        await until(lambda: client.pump() or client.terminated == [frames.Code.NO_ERROR] * 2)
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", it.port)


async def test_plain_http_is_hung_up_on(lean_server: Any) -> None:
    async with lean_server() as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"HTTP/2" in await asyncio.wait_for(reader.read(), 60)
        writer.close()
        await until(lambda: not it.server.peers)


async def test_nothing_is_left_of_a_connection_that_is_gone(lean_server: Any) -> None:
    async with lean_server() as it:
        client = await Http2.connect(it.port)
        client.request("/test.Echo/Hold", ends=False)
        client.request("/test.Echo/One", body=prefixed(b"x"))
        await client.answer()
        await until(lambda: it.seen.held)
        peers = [weakref.ref(peer) for peer in it.server.peers]
        client.close()
        await until(lambda: not it.server.peers and not it.seen.held)
        gc.collect()
        assert [peer() for peer in peers] == [None] * len(peers) != []


class Http2(asyncio.Protocol):
    """The `h2` package as a client, for what grpc's own never does."""

    def __init__(self, acknowledge: bool) -> None:
        self.connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.acknowledge = acknowledge
        self.terminated: list[int] = []
        self._answers: dict[int, dict[str, Any]] = {}
        self._done: asyncio.Queue[int] = asyncio.Queue()

    @classmethod
    async def connect(cls, port: int, acknowledge: bool = True) -> "Http2":
        _, client = await asyncio.get_running_loop().create_connection(lambda: cls(acknowledge), "127.0.0.1", port)
        return client

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.connection.initiate_connection()
        self.flush()

    def data_received(self, data: bytes) -> None:
        for event in self.connection.receive_data(data):
            match event:
                case h2.events.ResponseReceived() | h2.events.TrailersReceived():
                    self._answers.setdefault(event.stream_id, {"body": b""}).update(event.headers)
                case h2.events.DataReceived():
                    self._answers[event.stream_id]["body"] += event.data
                    if self.acknowledge:
                        self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                case h2.events.StreamReset():
                    if event.error_code:
                        self._answers.setdefault(event.stream_id, {})["reset"] = event.error_code
                        self._done.put_nowait(event.stream_id)
                case h2.events.StreamEnded():
                    self._done.put_nowait(event.stream_id)
                case h2.events.ConnectionTerminated():
                    self.terminated.append(event.error_code)
        self.flush()

    def flush(self) -> None:
        self.transport.write(self.connection.data_to_send())

    def pump(self) -> None:
        self.flush()

    def request(
        self, path: str, *more: tuple[str, str], body: bytes = b"", method: str = "POST", kind: str = "application/grpc",
        ends: bool = True,
    ) -> None:  # fmt: skip
        self.stream = self.connection.get_next_available_stream_id()
        head = [(":method", method), (":scheme", "http"), (":path", path), (":authority", "x"), ("content-type", kind)]
        self.connection.send_headers(self.stream, [*head, ("te", "trailers"), *more], end_stream=ends and not body)
        if body:
            self.send(body, ends)
        self.flush()

    def send(self, body: bytes, ends: bool = False) -> None:
        for at in range(0, len(body), 16_384):
            self.connection.send_data(self.stream, body[at : at + 16_384], end_stream=ends and at + 16_384 >= len(body))
        self.flush()

    async def answer(self) -> dict[str, Any]:
        answer = self._answers[await asyncio.wait_for(self._done.get(), 60)]
        if not answer.get("body"):
            answer.pop("body", None)
        return answer

    def close(self) -> None:
        self.transport.close()


def test_a_peer_that_sends_faster_than_it_is_answered_leaves_turns_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop reads up to 32 times in a row."""
    turn, large_reads = 0, list[int]()
    taken_in = ServerProtocol.data_received

    def noted(self: ServerProtocol, data: bytes) -> None:
        if len(data) >= limits.READ_BYTES:
            large_reads.append(turn)
        taken_in(self, data)

    monkeypatch.setattr(ServerProtocol, "data_received", noted)
    encoder = Encoder()
    encoder.header_table_size = 0
    fields = [(":method", "POST"), (":path", "/none/None"), (":scheme", "http"), (":authority", "x"), ("a", "a" * 600)]
    first, usual = encoder.encode(fields), encoder.encode(fields)
    flags = frames.END_HEADERS | frames.END_STREAM
    asked = [frames.frame(frames.HEADERS, flags, 2 * n + 1, usual if n else first) for n in range(10_000)]

    async def scene() -> None:
        nonlocal turn
        server = Server(1_000)
        port = await server.bind("127.0.0.1", 0)
        with socket.create_connection(("127.0.0.1", port)) as peer:
            sending = asyncio.create_task(asyncio.to_thread(peer.sendall, frames.PREFACE + frames.settings({}) + b"".join(asked)))
            while not sending.done() or len(large_reads) < 4:
                turn += 1
                await asyncio.sleep(0)
        await server.stop(0)

    uvloop.run(asyncio.wait_for(scene(), 60))
    assert len(large_reads) == len(set(large_reads))
