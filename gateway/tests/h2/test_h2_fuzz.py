"""Whatever a peer sends: no exception, no stream left behind, and what is legal is served the same however it is cut."""

import asyncio
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.gateway.h2 import frames
from penstock.gateway.h2.blocks import BlockCache
from penstock.gateway.h2.connection import Connection
from penstock.gateway.h2.messages import Assembler, CallFault, prefixed
from penstock.gateway.h2.stream import Stream

QUICK = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
BLOCKS = [
    b"\x83\x86\x44\x06/a.B/C",  # a request, without a table
    b"\x20\x83\x86\x44\x06/a.B/C",  # the same, giving up the table
    b"\x3f\xe1\x1f\x83\x86\x44\x06/a.B/C",  # asking for a table of 4,096
    b"\x40\x01a\x01b",  # trailers
    b"\xbe",
    b"",
    b"\xff\xff\xff\xff\xff\xff",
]
ids = st.sampled_from([0, 1, 1, 3, 3, 5, 7, 2, 9, 2**31 - 1])
payloads = st.one_of(st.sampled_from(BLOCKS), st.binary(max_size=40), st.just(bytes(8)), st.just((1).to_bytes(4)))
random_frames = st.builds(frames.frame, st.integers(0, 12), st.integers(0, 255), ids, payloads)
likely_frames = st.one_of(
    st.builds(lambda i, flags, block: frames.frame(frames.HEADERS, 4 | flags, i, block), ids, st.sampled_from([0, 1]),
              st.sampled_from(BLOCKS[:2])),
    st.builds(lambda i, flags, size: frames.frame(frames.DATA, flags, i, bytes(size)), ids, st.sampled_from([0, 1]),
              st.integers(0, 3000)),
    st.builds(frames.rst_stream, ids, st.sampled_from(list(frames.Code))),
    st.builds(frames.window_update, ids, st.integers(0, frames.MAX_WINDOW)),
    st.builds(lambda size: frames.settings({frames.Setting.INITIAL_WINDOW_SIZE: size}), st.integers(0, 2**31)),
    random_frames,
)  # fmt: skip
actions = st.one_of(likely_frames, st.sampled_from(["send", "end", "reset", "pause", "resume", "flush"]), st.binary(max_size=20))


class Echo:
    """A receiver that answers, now and then, from within what it hears."""

    def __init__(self, connection: Connection, stream: Stream, alive: set[int]) -> None:
        self.connection, self.stream, self.alive = connection, stream, alive
        alive.add(stream.id)

    def data(self, data: bytes) -> None:
        assert self.stream.id in self.alive
        self.connection.consumed(self.stream, len(data))
        if len(data) % 7 == 3:
            self.connection.egress.end(self.stream, b"\x88")
        elif len(data) % 7 == 5:
            self.connection.reset(self.stream.id, frames.Code.CANCEL)
        else:
            self.connection.send(self.stream, data)

    def end(self) -> None:
        self.connection.send(self.stream, b"bye")

    def reset(self, code: frames.Code) -> None:
        self.alive.remove(self.stream.id)

    def sent(self) -> None:
        pass


def check(connection: Connection) -> None:
    """What must hold between any two things that happen."""
    waiting = {id(stream) for stream in connection.streams.values() if stream.unsent}
    assert connection.egress.unsent == sum(len(stream.unsent) for stream in connection.streams.values())
    assert all(stream.open for stream in connection.streams.values())
    queued = {id(stream) for stream in connection.egress._turns if stream.unsent}
    assert queued <= waiting
    if connection.closed:
        assert not connection.streams


@QUICK
@given(st.lists(actions, max_size=60), st.booleans())
def test_random_frames_break_nothing_and_leave_nothing(parse: Any, said: list[Any], greet: bool) -> None:
    alive: set[int] = set()
    connection: Connection
    connection = Connection(lambda stream: Echo(connection, stream, alive), BlockCache(), 0.0)
    if greet:
        connection.receive(frames.PREFACE + frames.settings({}), 0.0)
    heard = b""
    for at, action in enumerate(said):
        first = next(iter(connection.streams.values()), None)
        match action:
            case bytes():
                connection.receive(action, at * 0.1)
            case "send" if first:
                connection.send(first, bytes(70_000))
            case "end" if first:
                connection.egress.end(first, b"\x88")
            case "reset" if first:
                connection.reset(first.id, frames.Code.CANCEL)
            case "pause":
                connection.pause()
            case "resume":
                connection.resume()
            case "flush":
                heard += b"".join(connection.out)
                connection.out.clear()
                connection.flushed()
        check(connection)
        assert set(connection.streams) <= alive
    connection.fail(frames.Code.NO_ERROR, "lost")
    check(connection)
    parse(heard + b"".join(connection.out))  # whole frames, whatever came


@QUICK
@given(st.lists(likely_frames, max_size=20), st.data())
def test_where_the_bytes_are_cut_makes_no_difference(said: list[bytes], draw: st.DataObject) -> None:
    flow = frames.PREFACE + frames.settings({}) + b"".join(said)
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(flow)), max_size=8)))

    def play(parts: list[bytes]) -> tuple[bytes, bool, str]:
        alive: set[int] = set()
        connection: Connection
        connection = Connection(lambda stream: Echo(connection, stream, alive), BlockCache(), 0.0)
        for part in parts:
            connection.receive(part, 0.0)
        return b"".join(connection.out), connection.closed, connection.fault

    pieces = [flow[a:b] for a, b in zip([0, *cuts], [*cuts, len(flow)], strict=True)]
    assert play(pieces) == play([flow])


@QUICK
@given(st.lists(st.binary(max_size=300), max_size=6), st.data())
def test_messages_survive_every_cut(messages: list[bytes], draw: st.DataObject) -> None:
    flow = b"".join(prefixed(message) for message in messages)
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(flow)), max_size=8)))
    assembler = Assembler(300)
    out: list[bytes] = []
    for a, b in zip([0, *cuts], [*cuts, len(flow)], strict=True):
        out += assembler.feed(flow[a:b])
    assert (out, assembler.partial) == (messages, 0)


@QUICK
@given(st.lists(st.binary(max_size=12), max_size=8))
def test_bytes_that_are_no_messages_are_refused_or_kept_short(parts: list[bytes]) -> None:
    assembler = Assembler(50)
    try:
        for part in parts:
            assert all(len(message) <= 50 for message in assembler.feed(part))
            assert assembler.partial <= 55
    except CallFault as fault:
        assert fault.details


def test_a_server_survives_garbage_on_a_socket(lean_server: Any) -> None:
    """Bytes of all kinds into a real socket: the next caller is served, and nothing is left."""

    async def run() -> None:
        async with lean_server() as server:
            import random

            chance = random.Random(7)
            for _ in range(60):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                start = frames.PREFACE + frames.settings({}) if chance.random() < 0.8 else b""
                opened = frames.frame(frames.HEADERS, 4, 1, server.block) if chance.random() < 0.7 else b""
                writer.write(start + opened + chance.randbytes(chance.randrange(200)))
                await writer.drain()
                if chance.random() < 0.5:
                    writer.write_eof()
                    await reader.read()
                writer.close()
            assert await server.ask([b"still", b"here"]) == [b"still", b"here"]
            async with asyncio.timeout(60):
                while server.server.calls or server.server.unread:
                    await asyncio.sleep(0.01)

    asyncio.run(run())
