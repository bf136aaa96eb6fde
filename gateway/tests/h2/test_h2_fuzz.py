"""Whatever a peer sends: no exception, no stream left behind, and what is legal is served the same however it is cut."""

import asyncio
from typing import Any

import pytest
from hpack import Encoder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.gateway.h2 import frames
from penstock.gateway.h2.forms import Connect, Connection, connect_by
from penstock.gateway.h2.messages import Assembler, CallFault, prefixed
from penstock.gateway.h2.stream import Stream
from penstock.gateway.picker.compiled import Compiled, installed

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
            self.connection.end(self.stream, b"\x88")
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
    assert connection.unsent == sum(stream.unsent for stream in connection.streams.values())
    assert all(stream.open for stream in connection.streams.values())
    if connection.closed:
        assert not connection.streams


def act(connection: Connection, action: Any, now: float) -> None:
    """One thing that happens, to the first stream if it is a stream's."""
    first = next(iter(connection.streams.values()), None)
    match action:
        case bytes():
            connection.receive(action, now)
        case "send" if first:
            connection.message(first, b"\x88", b"x")
            connection.send(first, bytes(70_000))
        case "end" if first:
            connection.end(first, b"\x88")
        case "reset" if first:
            connection.reset(first.id, frames.Code.CANCEL)
        case "pause":
            connection.pause()
        case "resume":
            connection.resume()
        case "flush":
            connection.flushed()
        case "tick":
            connection.tick(now + 25.0)


@QUICK
@given(st.lists(actions, max_size=60), st.booleans())
def test_random_frames_break_nothing_and_leave_nothing(parse: Any, connect: Connect, said: list[Any], greet: bool) -> None:
    alive: set[int] = set()
    connection: Connection
    connection = connect(lambda stream: Echo(connection, stream, alive), 0.0)
    if greet:
        connection.receive(frames.PREFACE + frames.settings({}), 0.0)
    heard = b""
    for at, action in enumerate(said):
        if action == "flush":
            heard += connection.take()
        act(connection, action, at * 0.1)
        check(connection)
        assert set(connection.streams) <= alive
    connection.fail(frames.Code.NO_ERROR, "lost")
    check(connection)
    parse(heard + connection.take())  # whole frames, whatever came


@QUICK
@given(st.lists(likely_frames, max_size=20), st.data())
def test_where_the_bytes_are_cut_makes_no_difference(connect: Connect, said: list[bytes], draw: st.DataObject) -> None:
    flow = frames.PREFACE + frames.settings({}) + b"".join(said)
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(flow)), max_size=8)))

    def play(parts: list[bytes]) -> tuple[bytes, bool, str]:
        alive: set[int] = set()
        connection: Connection
        connection = connect(lambda stream: Echo(connection, stream, alive), 0.0)
        for part in parts:
            connection.receive(part, 0.0)
        return connection.take(), connection.closed, connection.fault

    pieces = [flow[a:b] for a, b in zip([0, *cuts], [*cuts, len(flow)], strict=True)]
    assert play(pieces) == play([flow])


class Heard(Echo):
    """An echo that notes what it hears, in order."""

    def __init__(self, connection: Connection, stream: Stream, alive: set[int], told: list[Any]) -> None:
        super().__init__(connection, stream, alive)
        self.told = told
        head = stream.head
        told.append((stream.id, head.fields, list(head.pseudo.items()), head.content_length))

    def data(self, data: bytes) -> None:
        self.told.append((self.stream.id, data))
        super().data(data)

    def end(self) -> None:
        self.told.append((self.stream.id, "end"))
        super().end()

    def reset(self, code: frames.Code) -> None:
        self.told.append((self.stream.id, "reset", int(code)))
        super().reset(code)

    def sent(self) -> None:
        self.told.append((self.stream.id, "sent"))


class Played:
    """What became of a connection of one form, of which others hear the same."""

    def __init__(self, form: Compiled | None) -> None:
        self.told: list[Any] = []
        alive: set[int] = set()
        self.connection: Connection = connect_by(form)(
            lambda stream: Heard(self.connection, stream, alive, self.told) if stream.id % 11 else None, 0.0
        )

    def does(self, action: Any, now: float) -> tuple[Any, ...]:
        """One thing that happens, and what can be seen of it."""
        connection = self.connection
        act(connection, action, now)
        windows = [(it.id, it.send_window, it.unsent) for it in connection.streams.values()]
        seen = connection.closed, connection.fault, connection.unsent, connection.max_frame, connection.receive_window
        return connection.take(), seen, windows, self.told


@QUICK
@given(st.lists(st.one_of(actions, st.just("tick")), max_size=40), st.booleans(), st.data())
def test_both_forms_say_the_same_and_tell_the_same(said: list[Any], greet: bool, draw: st.DataObject) -> None:
    python, other = Played(None), Played(both_forms())
    for at, action in enumerate([frames.PREFACE + frames.settings({}), *said] if greet else said):
        size = len(action) if isinstance(action, bytes) else 0
        cut = draw.draw(st.integers(0, size)) if size else 0
        for part in (action[:cut], action[cut:]) if size else (action,):
            assert python.does(part, at * 0.1) == other.does(part, at * 0.1)


names = st.sampled_from([":method", ":path", ":scheme", ":odd", "te", "x-a", "content-length", "Upper", "cookie", "upgrade", ""])
texts = st.sampled_from(["POST", "/a", "http", "trailers", "12", "013", " x", "\x00", "é", ""]) | st.text(
    st.characters(max_codepoint=255), max_size=30
)
lists = st.lists(st.tuples(names, texts), max_size=8)


@QUICK
@given(
    st.lists(st.tuples(lists, st.booleans(), st.sampled_from([None, 0, 60, 4096])), max_size=6),
    st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=1),
)
def test_both_forms_read_header_blocks_alike(said: list[Any], damage: list[tuple[int, int]]) -> None:
    """Whatever tables and codes a peer uses; a request's own headers stand before, so that most are taken."""
    python, other, encoder = Played(None), Played(both_forms()), Encoder()
    start = frames.PREFACE + frames.settings({})
    assert python.does(start, 0.0) == other.does(start, 0.0)
    for number, (fields, huffman, table) in enumerate(said):
        if table is not None:
            encoder.header_table_size = table
        usual = [(":method", "POST"), (":scheme", "http"), (":path", "/a.B/C")] if number % 2 else []
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in [*usual, *fields]]
        block = bytearray(encoder.encode(raw, huffman=huffman))
        for at, byte in damage if number > 2 and block else []:
            block[at % len(block)] = byte
        request = frames.frame(frames.HEADERS, frames.END_HEADERS, 2 * number + 1, bytes(block))
        assert python.does(request, 0.0) == other.does(request, 0.0)


def both_forms() -> Compiled:
    """The compiled form, to be held against Python's."""
    found = installed()
    if found is None:
        pytest.skip("penstock-gateway-native is not built: make native")
    return found


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
