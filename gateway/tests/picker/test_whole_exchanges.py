"""Exchanges that the compiled connection takes in by itself, against calls that read the same bytes: usual ones, and whatever
else a proxy may say, cut anywhere."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hpack import Encoder
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exchange import DUPLEX, TRAILERS, FixedDirector, chunk, head
from wires import Sink, by_stream

from penstock.api import headers
from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.gateway._pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2 import HttpHeaders, ProcessingRequest
from penstock.gateway.extproc import service
from penstock.gateway.extproc.answers import CHUNK_BYTES
from penstock.gateway.extproc.call import SHUTTING_DOWN, Answered, Call, Refused, ResponseHead, Routed
from penstock.gateway.extproc.ceiling import Ceiling
from penstock.gateway.extproc.service import METHOD, SERVICE, ExtProcService
from penstock.gateway.extproc.wire import wire_of
from penstock.gateway.h2 import frames, server
from penstock.gateway.h2.messages import prefixed
from penstock.gateway.h2.server import Server, ServerProtocol
from penstock.gateway.load.own_reports import OwnReports
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.compiled import MODULE, installed
from penstock.gateway.picker.state import FleetState

pytest.importorskip(MODULE, reason="penstock-gateway-native is not built: make native")
CALL = [
    (":method", "POST"), (":scheme", "http"), (":path", f"/{SERVICE}/{METHOD}"), (":authority", "x"),
    ("content-type", "application/grpc"), ("te", "trailers"),
]  # fmt: skip
APART = [(headers.PHASE, headers.REQUEST_PHASE)]


@pytest.fixture(scope="module", autouse=True)
def no_clock() -> Iterator[None]:
    """Who goes on sending is heard until it ends: a clock would tell the two sides apart where the machine is busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "HEARD_BEFORE_S", 3600.0)
        patch.setattr(service, "HEARD_OUT_S", 3600.0)
        patch.setattr(server, "PATIENCE_S", 0.0)
        yield


NAMED: dict[str, dict[str, Any]] = {
    "/v1/completions": {},
    "/v1/embeddings": {"tenant": "t\xe4", "model": ""},
    "/v1/tenants": {"sets": [(headers.TENANT, "t")], "removes": ("authorization",)},
    "/v1/explained": {"explanation": "why"},
    "/v1/unnamed": {"request_id": "r-1"},
    "/v1/foreign": {"pool": None},
}
"""Requests of our own Envoy by their paths, the usual ones first."""
CHOICE: Any = SimpleNamespace(policy="Cost", scores=[0.25, 1], resident_tokens=3, hop=None)


class Sayer(FixedDirector):
    """A director that notes what it hears, and whose paths say what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[object] = []
        self.go_on = asyncio.Event()

    async def route(self, call: Call) -> Routed | Answered:
        self.heard.append((call.headers, call.body, call.subset))
        match call.path:
            case "/refuse":
                raise Refused(429, "not you", "rate")
            case "/leave":
                raise Refused(503, "going", SHUTTING_DOWN)
            case "/fail":
                raise ValueError("a mistake")
            case "/wait":
                await self.go_on.wait()
        routed = await super().route(call)
        if isinstance(routed, Routed) and call.path in NAMED:
            return msgspec.structs.replace(
                routed, named="b-1", name="n\xe4me", choice=CHOICE, prompt_tokens=7, decided=1.5, **NAMED[call.path]
            )
        return routed

    def decide(self, fields: dict[str, str], body: bytes) -> Routed | None:
        """As `route`, at once, where that goes on with the request or fails."""
        if fields[":path"] not in (*NAMED, "/fail"):
            return None
        with pytest.raises(StopIteration) as ended:
            self.route(Call(headers=fields, body=body)).send(None)
        return ended.value.value

    def returned(self, noted: Mapping[str, str], head: ResponseHead) -> list[tuple[str, str]]:
        self.heard.append((noted, head.headers, head.served))
        if head.headers.get(":status") == "fail":
            raise ValueError("a mistake")
        return []

    def passed_on(self, routed: Routed) -> None:
        self.gone_on = routed
        self.heard.append("passed on")

    def closed(self, routed: Routed) -> None:
        self.heard.append("closed")

    def refused(self, call: Call, refused: Refused) -> None:
        self.heard.append((call.headers, str(refused)))


class Side:
    """A server of either kind, and what it has said by stream after each read."""

    def __init__(self, *, whole: bool, ceiling: Ceiling | None = None, at_once: bool = False) -> None:
        compiled = installed()
        self.director, self.ceiling = Sayer(), ceiling or Ceiling()
        self.director.at_once = self.director.decide if at_once else None
        self.service = ExtProcService(self.director, 1, ceiling=self.ceiling, wire=wire_of(compiled), traced=True)
        self.server = Server(100_000, compiled=compiled)
        self.service.add_to(self.server)
        assert self.server.shortcut is not None
        if not whole:
            self.server.shortcut = None
        self.protocol, self.sink = ServerProtocol(self.server), Sink()
        self.protocol.connection_made(self.sink)
        self.protocol.data_received(frames.PREFACE + frames.settings({}))

    async def said(self, read: bytes) -> dict[int, bytes]:
        """What it answers to a read, by stream."""
        asyncio.get_running_loop().call_soon(self.protocol.data_received, read)  # outside of any task, as from a transport
        return await self.more()

    async def more(self) -> dict[int, bytes]:
        """What it says meanwhile."""
        for _ in range(6):
            await asyncio.sleep(0)
        written, self.sink.written = self.sink.written, b""
        return by_stream(written)

    def counts(self) -> tuple[int, ...]:
        return self.service.open, self.server.calls, self.server.unread, self.ceiling.streams, self.ceiling.bytes

    async def end(self) -> tuple[int, ...]:
        asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)
        await self.more()
        return self.counts()


def shown(status: str = "200", *, noted: bool = True, observed: bool = True) -> ProcessingRequest:
    message = ProcessingRequest(response_headers=HttpHeaders(), observability_mode=observed)
    message.response_headers.headers.headers.add(key=":status", raw_value=status.encode())
    if noted:
        message.metadata_context.filter_metadata[headers.LOG_NAMESPACE].update({headers.BOOKING: "b-1", "model": "m"})
    message.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": "10.0.0.1:8000"})
    return message


def hinted(message: ProcessingRequest) -> ProcessingRequest:
    message.metadata_context.filter_metadata[headers.SUBSET_NAMESPACE].update({headers.SUBSET: "10.0.0.1:8000"})
    return message


def traced(message: ProcessingRequest) -> ProcessingRequest:
    message.request_headers.headers.headers.add(key="x-request-id", value="r")
    return message


PATHS = (*NAMED, "/v1/chat/completions", "/v1/models", "/refuse", "/leave", "/fail", "/wait", "/nowhere")
heads = st.builds(
    head, st.sampled_from([DUPLEX, DUPLEX, None, *ProcessingMode.BodySendMode.values()]), path=st.sampled_from(PATHS)
)
rest = st.one_of(
    st.builds(chunk, st.binary(max_size=300), st.booleans()),
    st.just(chunk(b"{}", ends=True)),
    st.just(hinted(chunk(b"{}", ends=True))),
    st.just(TRAILERS),
    st.builds(shown, st.sampled_from(["200", "100", "fail"]), noted=st.booleans(), observed=st.booleans()),
)
usual = st.builds(lambda first, body: [first, chunk(body[:9]), chunk(body[9:], ends=True)], heads, st.binary(max_size=300))
exchanges = st.one_of(
    usual,
    st.builds(lambda first, more: [first, *more], heads | heads.map(hinted) | heads.map(traced), st.lists(rest, max_size=3)),
    st.lists(rest, min_size=1, max_size=2),
).map(lambda messages: b"".join(prefixed(message.SerializeToString()) for message in messages))
behind = st.sampled_from([b"\0\0", b"\1\0\0\0\0", b"\0\0\0\0\0", prefixed(chunk(b"{}", ends=True).SerializeToString())])
"""What may come behind an exchange that is complete."""
mangled = st.builds(lambda data, more: data + more, exchanges, behind) | st.builds(
    lambda data, at, put: data[:at] + put + data[at + len(put) :], exchanges, st.integers(0, 300), st.binary(max_size=2)
)
calls = st.sampled_from(
    [
        *[CALL + APART] * 5,
        CALL,
        [*CALL, *APART, ("traceparent", "00-1-2-01")],
        [*CALL, *APART, ("grpc-encoding", "gzip")],
        [*CALL, *APART, ("grpc-timeout", "1H")],
        [*CALL[:4], ("content-type", "application/grpc+proto"), *APART],
        [*CALL[:4], ("content-type", "text/plain"), *APART],
        [*CALL[:2], (":path", "/no/method"), *CALL[3:]],
    ]
)
END, RESET = "end", "reset"


def bytes_of(streams: list[tuple[Any, bytes, str]], cuts: list[int]) -> bytes:
    """The frames of these streams, whose data takes turns in pieces of these sizes."""
    encoder = Encoder()
    encoder.header_table_size = 0
    out, waiting = b"", dict[int, tuple[bytes, str]]()
    for n, (call, data, last) in enumerate(streams):
        out += frames.frame(frames.HEADERS, frames.END_HEADERS, 2 * n + 1, encoder.encode(call))
        waiting[2 * n + 1] = data, last
    for turn in range(10_000):
        if not waiting:
            return out
        stream = sorted(waiting)[turn % len(waiting)]
        data, last = waiting.pop(stream)
        size = cuts[turn % len(cuts)]
        piece, data = data[:size], data[size:]
        flags = frames.END_STREAM if last == END and not data else 0
        out += frames.frame(frames.DATA, flags, stream, piece)
        if data:
            waiting[stream] = data, last
        elif last == RESET:
            out += frames.rst_stream(stream, frames.Code.CANCEL)
    raise AssertionError("it does not end")


async def agree(data: bytes, reads: list[int]) -> None:
    sides = [Side(whole=False), Side(whole=True), Side(whole=True, at_once=True)]
    at = turn = 0
    while at < len(data):
        size = reads[turn % len(reads)]
        said = [await side.said(data[at : at + size]) for side in sides]
        assert said[0] == said[1] == said[2]
        assert len({side.protocol.connection.closed for side in sides}) == 1
        at, turn = at + size, turn + 1
    for side in sides:
        side.director.go_on.set()
    said = [await side.more() for side in sides]
    assert said[0] == said[1] == said[2]
    heard = [sorted(map(repr, side.director.heard)) for side in sides]
    assert heard[0] == heard[1] == heard[2]
    assert [await side.end() for side in sides] == [(0, 0, 0, 0, 0)] * 3


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(calls, exchanges | exchanges | mangled, st.sampled_from(["", END, RESET])), min_size=1, max_size=4),
    st.lists(st.integers(1, 400), min_size=1, max_size=4),
    st.lists(st.integers(1, 2_000), min_size=1, max_size=4),
)
def test_exchanges_taken_in_whole_are_those_that_calls_take(
    streams: list[tuple[Any, bytes, str]], cuts: list[int], reads: list[int]
) -> None:
    asyncio.run(agree(bytes_of(streams, cuts), reads))


def request(body: bytes, path: str = "/v1/completions") -> bytes:
    messages = [head(path=path), *(chunk(body[at : at + 5_000]) for at in range(0, len(body), 5_000)), chunk(b"", ends=True)]
    return b"".join(prefixed(message.SerializeToString()) for message in messages)


@pytest.mark.parametrize("size", [0, CHUNK_BYTES - 1_000, CHUNK_BYTES, CHUNK_BYTES + 5_000, 300_000])
async def test_bodies_of_any_size_go_on_alike(size: int) -> None:
    await agree(bytes_of([(CALL + APART, request(bytes(size)), "")] * 2, [16_000]), [30_000])


def read_by_read(call: list[tuple[str, str]], *data: bytes, stream: int = 1) -> list[bytes]:
    """The frames of a stream whose first message comes with its head."""
    begin, *more = (frames.frame(frames.DATA, 0, stream, piece) for piece in data)
    encoder = Encoder()
    encoder.header_table_size = 0
    return [frames.frame(frames.HEADERS, frames.END_HEADERS, stream, encoder.encode(call)) + begin, *more]


async def test_a_usual_request_and_a_shown_head_make_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(whole=True)
    monkeypatch.delattr(side.server, "methods")
    first = prefixed(head().SerializeToString())
    asked = request(b'{"model": "m"}')[len(first) :]
    await side.said(b"".join(read_by_read(CALL + APART, first + asked)))
    for read in read_by_read(CALL + APART, first, asked[:9], asked[9:], stream=3):
        await side.said(read)
    for read in read_by_read(CALL, prefixed(shown().SerializeToString()), stream=5):
        await side.said(read)
    assert [type(it) for it in side.director.heard] == [tuple, str, tuple, str, tuple]
    assert side.director.gone_on.named and side.director.gone_on.choice is None, "it has figures of all replicas"
    assert side.counts() == (0, 0, 0, 0, 0)


class Heads:
    """What heads need of a fleet whose one request is named `b-1`, and what is told of them."""

    def __init__(self, *, fails: bool = False) -> None:
        state = FleetState(compiled=installed())
        model = Model(id="b/m", served_names=["m"])
        replica = Replica(uid="u", name="r", pool="p", host="10.0.0.1", port=8000, events_port=1, replay_port=1, ready=True)
        state.update(Fleet(models=[model], pools=[Pool(id="p", model="b/m")], replicas=[replica]))
        booking = state.bookings.book("q", ReplicaKey("u", 8000), 1, 0.0)
        routed = Routed(endpoints=[], pool=None, booking=booking, model="b/m", name="m", came=0.0)
        responses, self.told, self._fails = state.usual_responses(OwnReports(state.compiled).reader), list[object](), fails
        assert state.compiled is not None and responses is not None
        at = {"b-1": routed}, set[str](), headers.BOOKING
        self.usual = state.compiled.Heads(responses, *at, lambda: 1.0, self._told)

    def _told(self, *said: object) -> None:
        if self._fails:
            raise ValueError("a mistake")
        self.told.append(said[1:])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("fails", [False, True])
async def test_a_usual_head_is_not_told_of_and_any_other_is(monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
    heads = Heads(fails=fails)
    answers = list[list[dict[int, bytes]]]()
    for usual, told_of in ((None, 2), (heads.usual, 1 + fails)):
        monkeypatch.setattr(Sayer, "usual_heads", usual)
        side, said = Side(whole=True), list[dict[int, bytes]]()
        for stream, kind in ((1, "text/html"), (3, "application/json")):
            message = shown()
            message.response_headers.headers.headers.add(key="content-type", raw_value=kind.encode())
            (read,) = read_by_read(CALL, prefixed(message.SerializeToString()), stream=stream)
            said.append(await side.said(read))
        assert len(side.director.heard) == told_of
        assert side.counts() == (0, 0, 0, 0, 0)
        answers.append(said)
    assert heads.told == ([] if fails else [("200", 1.0, False)])
    assert answers[0] == answers[1]


async def test_the_end_of_a_shown_head_goes_out_with_what_somebody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PATIENCE_S", 3600.0)
    side, encoder = Side(whole=True), Encoder()
    encoder.header_table_size = 0
    await side.more()

    def heads(*streams: int) -> bytes:
        message = prefixed(shown().SerializeToString())
        return b"".join(b"".join(read_by_read(CALL, message, stream=stream)) for stream in streams)

    assert await side.said(heads(1, 3)) == {}
    asked = await side.said(b"".join(read_by_read(CALL + APART, request(b"x"), stream=5)))
    assert list(asked) == [1, 3, 5]
    assert await side.said(heads(7)) == {}
    assert list(await side.said(frames.frame(frames.PING, 0, 0, bytes(8)) + heads(9))) == [7, 0, 9]
    late = side.protocol._late
    assert late is not None
    assert await side.said(heads(11)) == {}
    assert side.protocol._late is late, "one timer is for all that comes meanwhile"
    side.protocol._overdue()
    assert list(await side.more()) == [11]
    monkeypatch.setattr(server, "PATIENCE_S", 0.0)
    assert list(await side.said(heads(13))) == [13]  # and without anything else, soon


async def test_what_is_not_complete_or_waits_counts() -> None:
    first = prefixed(head(path="/wait").SerializeToString())
    asked = [prefixed(chunk(b"x" * size, ends).SerializeToString()) for size, ends in ((200, False), (100, True))]
    side, found = Side(whole=True), list[tuple[int, ...]]()
    for read in read_by_read(CALL + APART, first, *asked):
        await side.said(read)
        found.append(side.counts())
    assert found == [(1, 1, 0, 1, 0), (1, 1, 0, 1, 200), (1, 1, 0, 1, 300)]
    side.director.go_on.set()
    assert list(await side.more()) == [1]
    assert side.counts() == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("make", [lambda: Ceiling(streams=0), lambda: Ceiling(size=299)])
@pytest.mark.parametrize("cut", [100_000, 330, 460, 500])
async def test_who_finds_no_room_is_refused_as_by_a_call(make: Callable[[], Ceiling], cut: int) -> None:
    data = bytes_of([(CALL + APART, request(b"x" * 300), "")], [100_000])
    said: list[list[dict[int, bytes]]] = []
    for whole, at_once in ((False, False), (True, False), (True, True)):
        side = Side(whole=whole, ceiling=make(), at_once=at_once)
        said.append([await side.said(data[:cut]), await side.said(data[cut:])])
        assert next(it[-1] for it in side.director.heard if isinstance(it, tuple)).startswith("the gateway is overloaded")
        assert side.counts() == (0, 0, 0, 0, 0)
    assert said[0] == said[1] == said[2]


async def test_a_request_whose_caller_goes_while_it_waits_is_given_up() -> None:
    data = bytes_of([(CALL + APART, request(b"x", "/wait"), "")], [100_000])
    side = Side(whole=True)
    await side.said(data)
    assert side.counts() == (1, 1, 0, 1, 1)
    await side.said(frames.rst_stream(1, frames.Code.CANCEL))
    assert side.counts() == (0, 0, 0, 0, 0)
    assert "passed on" not in side.director.heard


async def test_a_server_that_is_full_refuses_what_would_stay() -> None:
    side = Side(whole=True)
    side.server.max_calls = 0
    data = bytes_of([(CALL + APART, request(b"x"), "")], [100_000])
    answers = await side.said(data[:-10])
    assert answers[1].endswith(frames.rst_stream(1, frames.Code.REFUSED_STREAM))
