"""The HTTP/2 state machine against RFC 9113: what it takes, what it refuses and with which code."""

import resource
import sys
from pathlib import Path
from typing import Any

import pytest
from hpack import Decoder, Encoder, HPACKError
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.h2 import limits
from penstock.gateway.h2.blocks import NO_TABLE, BlockCache, BlockReader, literal, read_fields
from penstock.gateway.h2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEAD_BYTES,
    HEADERS,
    MAX_WINDOW,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    Code,
    ConnectionFault,
    Setting,
    frame,
    goaway,
    read_settings,
    rst_stream,
    settings,
    window_update,
)  # fmt: skip

WORD = (7).to_bytes(4)


def test_it_greets_with_settings_and_a_large_window(make_pair: Any) -> None:
    first, second = make_pair(greet=False).heard()
    assert first.kind == SETTINGS
    said = dict(read_settings(first.payload))
    assert said[Setting.HEADER_TABLE_SIZE] == 0
    assert said[Setting.INITIAL_WINDOW_SIZE] == limits.STREAM_WINDOW
    assert said[Setting.MAX_CONCURRENT_STREAMS] == limits.MAX_STREAMS
    assert (second.kind, second.stream) == (WINDOW_UPDATE, 0)
    assert DEFAULT_WINDOW + second.number == limits.CONNECTION_WINDOW


def test_a_request_arrives_whole_however_it_is_cut(make_pair: Any, data: Any) -> None:
    for size in (1, 2, 7, 1000):
        pair = make_pair(greet=False)
        flow = PREFACE + settings({}) + pair.request() + data(b"hello ") + data(b"world", ends=True)
        for at in range(0, len(flow), size):
            pair.say(flow[at : at + size])
        (notes,) = pair.notes
        assert (notes.received, notes.ended) == (b"hello world", 1)
        assert notes.stream.head.pseudo[":path"] == "/a.B/C"
        assert notes.stream.head.get("te") == "trailers"
        assert SETTINGS in {it.kind for it in pair.heard() if it.flags & ACK}


def test_header_blocks_over_several_frames_with_padding_and_priority(pair: Any) -> None:
    block = pair.block()
    first = b"\x03" + bytes(5) + block[:4] + bytes(3)
    pair.say(
        frame(HEADERS, PADDED | WITH_PRIORITY | END_STREAM, 1, first),
        frame(CONTINUATION, 0, 1, block[4:9]),
        frame(CONTINUATION, END_HEADERS, 1, block[9:]),
    )
    assert (pair.notes[0].ended, pair.notes[0].stream.head.pseudo[":method"]) == (1, "POST")


def test_padding_is_no_data_and_gives_its_window_back(pair: Any, data: Any) -> None:
    notes = pair.opened()
    for _ in range(limits.STREAM_WINDOW // 256 + 10):
        pair.say(data(b"\xfe" + b"x" + bytes(254), flags=PADDED))
    assert not notes.resets
    assert notes.received == b"x" * len(notes.received)
    assert [it.stream for it in pair.heard() if it.kind == WINDOW_UPDATE] == [1]


def test_trailers_of_the_request_end_it(pair: Any, data: Any) -> None:
    notes = pair.opened()
    pair.say(data(b"x"), pair.request(ends=True, fields=[("checksum", "1")]))
    assert (notes.received, notes.ended) == (b"x", 1)


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        (Code.PROTOCOL_ERROR, [frame(DATA, 0, 0, b"x")]),
        (Code.PROTOCOL_ERROR, [frame(DATA, 0, 1, b"x")]),  # never opened
        (Code.PROTOCOL_ERROR, [frame(DATA, 0, 2, b"x")]),
        (Code.PROTOCOL_ERROR, [frame(HEADERS, END_HEADERS, 2, b"\x82")]),
        (Code.PROTOCOL_ERROR, [frame(HEADERS, END_HEADERS, 0, b"\x82")]),
        (Code.PROTOCOL_ERROR, [frame(HEADERS, END_HEADERS | PADDED, 1, b"\x05abc")]),
        (Code.FRAME_SIZE_ERROR, [frame(HEADERS, END_HEADERS | WITH_PRIORITY, 1, b"abc")]),
        (Code.FRAME_SIZE_ERROR, [frame(HEADERS, END_HEADERS | PADDED, 1, b"")]),
        (Code.COMPRESSION_ERROR, [frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\x0f")]),
        (Code.COMPRESSION_ERROR, [frame(HEADERS, END_HEADERS, 1, b"\xbe")]),  # an entry of the dynamic table that is none
        (Code.COMPRESSION_ERROR, [frame(HEADERS, END_HEADERS, 1, b"\x40")]),
        (Code.PROTOCOL_ERROR, [frame(HEADERS, 0, 1, b""), frame(PING, 0, 0, bytes(8))]),
        (Code.PROTOCOL_ERROR, [frame(HEADERS, 0, 1, b""), frame(CONTINUATION, END_HEADERS, 3, b"")]),
        (Code.PROTOCOL_ERROR, [frame(HEADERS, 0, 1, b""), frame(99, 0, 1, b"")]),
        (Code.PROTOCOL_ERROR, [frame(CONTINUATION, END_HEADERS, 1, b"")]),
        (Code.PROTOCOL_ERROR, [frame(PRIORITY, 0, 0, bytes(5))]),
        (Code.FRAME_SIZE_ERROR, [frame(PRIORITY, 0, 1, bytes(4))]),
        (Code.PROTOCOL_ERROR, [rst_stream(0, Code.CANCEL)]),
        (Code.PROTOCOL_ERROR, [rst_stream(1, Code.CANCEL)]),
        (Code.FRAME_SIZE_ERROR, [frame(RST_STREAM, 0, 1, b"123")]),
        (Code.PROTOCOL_ERROR, [frame(SETTINGS, 0, 1, b"")]),
        (Code.FRAME_SIZE_ERROR, [frame(SETTINGS, 0, 0, bytes(5))]),
        (Code.FRAME_SIZE_ERROR, [frame(SETTINGS, ACK, 0, bytes(6))]),
        (Code.FLOW_CONTROL_ERROR, [settings({Setting.INITIAL_WINDOW_SIZE: 2**31})]),
        (Code.PROTOCOL_ERROR, [settings({Setting.MAX_FRAME_SIZE: 16_383})]),
        (Code.PROTOCOL_ERROR, [settings({Setting.MAX_FRAME_SIZE: 2**24})]),
        (Code.PROTOCOL_ERROR, [settings({Setting.ENABLE_PUSH: 2})]),
        (Code.PROTOCOL_ERROR, [frame(PUSH_PROMISE, END_HEADERS, 1, bytes(4))]),
        (Code.PROTOCOL_ERROR, [frame(PING, 0, 1, bytes(8))]),
        (Code.FRAME_SIZE_ERROR, [frame(PING, 0, 0, bytes(7))]),
        (Code.PROTOCOL_ERROR, [frame(GOAWAY, 0, 1, bytes(8))]),
        (Code.FRAME_SIZE_ERROR, [frame(GOAWAY, 0, 0, bytes(7))]),
        (Code.PROTOCOL_ERROR, [window_update(0, 0)]),
        (Code.PROTOCOL_ERROR, [window_update(1, 1)]),
        (Code.FRAME_SIZE_ERROR, [frame(WINDOW_UPDATE, 0, 0, b"123")]),
        (Code.FLOW_CONTROL_ERROR, [window_update(0, MAX_WINDOW)]),
        (Code.FRAME_SIZE_ERROR, [frame(DATA, 0, 1, bytes(16_385))[:20]]),  # its head is enough
    ],
)
def test_faults_that_end_the_connection(pair: Any, code: Code, parts: list[bytes]) -> None:
    pair.say(*parts)
    assert pair.died_of() == code
    pair.say(frame(PING, 0, 0, bytes(8)))
    assert pair.heard() == []


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nXX", b"\x16\x03\x01"])
def test_what_is_no_http2_is_hung_up_on(make_pair: Any, first: bytes) -> None:
    pair = make_pair(greet=False)
    pair.say(first)
    assert pair.died_of() == Code.PROTOCOL_ERROR


@pytest.mark.parametrize("first", [frame(PING, 0, 0, bytes(8)), frame(SETTINGS, ACK, 0), frame(77, 0, 0)])
def test_the_first_frame_is_settings(make_pair: Any, first: bytes) -> None:
    pair = make_pair(greet=False)
    pair.say(PREFACE, first)
    assert pair.died_of() == Code.PROTOCOL_ERROR


def fields(*more: tuple[str, str], **pseudo: str | None) -> list[tuple[str, str]]:
    kept = {"method": "POST", "scheme": "http", "path": "/a.B/C", **pseudo}
    return [(f":{name}", value) for name, value in kept.items() if value is not None] + list(more)


@pytest.mark.parametrize(
    "wrong",
    [
        fields(method=None), fields(scheme=None), fields(path=None), fields(path=""), fields(status="200"),
        [*fields(), ("a", "b"), (":authority", "late")], [*fields(), (":path", "/twice")],
        fields(("Upper", "x")), fields(("bad name", "x")), fields(("", "x")), fields(("x", "a\nb")), fields(("x", "a\0b")),
        fields(("x", " a")), fields(("x", "a ")), fields(("connection", "close")), fields(("transfer-encoding", "chunked")),
        fields(("te", "gzip")), fields(("content-length", "-1")), fields(("content-length", "1"), ("content-length", "2")),
    ],
)  # fmt: skip
def test_malformed_requests_are_reset_and_the_connection_lives(pair: Any, wrong: list[tuple[str, str]]) -> None:
    pair.say(pair.request(fields=wrong))
    assert pair.reset_with() == [(1, Code.PROTOCOL_ERROR)]
    assert not pair.notes
    pair.opened(3)


def test_content_length_must_hold(pair: Any, data: Any) -> None:
    for stream, sent, good in ((1, b"abc", True), (3, b"ab", False), (5, b"abcd", False)):
        pair.say(pair.request(stream, fields=fields(("content-length", "3"))), data(sent, stream, ends=True))
        assert pair.reset_with() == ([] if good else [(stream, Code.PROTOCOL_ERROR)])


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        (Code.STREAM_CLOSED, [frame(DATA, END_STREAM, 1, b"x"), frame(DATA, 0, 1, b"x")]),
        (Code.PROTOCOL_ERROR, [window_update(1, 0)]),
        (Code.FLOW_CONTROL_ERROR, [window_update(1, MAX_WINDOW)]),
    ],
)
def test_faults_that_end_a_stream(pair: Any, code: Code, parts: list[bytes]) -> None:
    notes = pair.opened()
    pair.say(*parts)
    assert pair.reset_with() == [(1, code)]
    assert (notes.resets, pair.connection.streams) == ([code], {})
    pair.opened(3)


def test_headers_after_the_end_and_trailers_that_are_none(pair: Any, data: Any) -> None:
    pair.opened()
    pair.say(data(b"", ends=True), pair.request(ends=True, fields=[("a", "b")]))
    assert pair.reset_with() == [(1, Code.STREAM_CLOSED)]
    for stream, ends, trailer in ((3, False, ("a", "b")), (5, True, (":path", "/")), (7, True, ("A", "b"))):
        pair.opened(stream)
        pair.say(pair.request(stream, ends=ends, fields=[trailer]))
        assert pair.reset_with() == [(stream, Code.PROTOCOL_ERROR)]


def test_streams_are_opened_in_order(pair: Any) -> None:
    pair.opened(5)
    pair.say(pair.request(3))
    assert pair.died_of() == Code.PROTOCOL_ERROR


def test_what_was_on_its_way_when_a_stream_was_reset_is_let_pass(pair: Any, data: Any) -> None:
    pair.opened()
    pair.connection.reset(1, Code.CANCEL)
    assert pair.reset_with() == [(1, Code.CANCEL)]
    pair.say(data(b"x"), window_update(1, 5), pair.request(ends=True, fields=[("a", "b")]), rst_stream(1, Code.CANCEL))
    assert pair.heard() == []
    assert not pair.connection.closed


def test_a_refused_stream_may_be_tried_again(make_pair: Any) -> None:
    pair = make_pair(refuse=True)
    pair.say(pair.request())
    assert pair.reset_with() == [(1, Code.REFUSED_STREAM)]


def test_header_lists_of_open_streams_have_a_bound_in_bytes(
    make_pair: Any, head_fields: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(len(name) + len(value) + 32 for name, value in head_fields)
    monkeypatch.setattr(limits, "MAX_HEADER_BYTES", 2 * size + 1)
    pair = make_pair()
    first, _ = pair.opened(1), pair.opened(3)
    pair.say(pair.request(5))
    assert pair.reset_with() == [(5, Code.REFUSED_STREAM)]
    pair.say(rst_stream(3, Code.CANCEL), pair.request(7), pair.request(9))
    assert pair.reset_with() == [(9, Code.REFUSED_STREAM)]
    pair.connection.end(first.stream, literal("grpc-status", "0"))
    pair.heard()
    pair.say(pair.request(11), pair.request(13, fields=[*head_fields, ("a", "b")]))
    assert pair.reset_with() == [(13, Code.REFUSED_STREAM)]
    assert [notes.stream.id for notes in pair.notes] == [1, 3, 7, 11]


def test_pings_are_answered_and_unknown_frames_ignored(pair: Any) -> None:
    pair.say(
        frame(PING, 0, 0, b"12345678"), frame(PING, ACK, 0, bytes(8)), frame(42, 255, 9, b"?"), frame(PRIORITY, 0, 9, bytes(5))
    )
    (answer,) = pair.heard()
    assert (answer.kind, answer.flags, answer.payload) == (PING, ACK, b"12345678")
    pair.say(goaway(0, Code.NO_ERROR), settings({}), frame(SETTINGS, 0, 0, b"\x00\x99" + WORD))
    assert [(it.kind, it.flags) for it in pair.heard()] == [(SETTINGS, ACK)] * 2


# --- flow control, towards the peer ---


def sent(pair: Any) -> dict[int, int]:
    """Bytes of data said, by stream."""
    totals: dict[int, int] = {}
    for it in pair.heard():
        if it.kind == DATA:
            assert len(it.payload) <= pair.connection.max_frame
            totals[it.stream] = totals.get(it.stream, 0) + len(it.payload)
    return totals


def test_answers_stay_inside_both_windows_and_follow_the_updates(pair: Any) -> None:
    first, second = pair.opened(1), pair.opened(3)
    pair.connection.send(first.stream, bytes(100_000))
    assert sent(pair) == {1: DEFAULT_WINDOW}
    pair.connection.send(second.stream, b"x")
    assert sent(pair) == {}  # the connection's window is used up
    pair.say(window_update(0, 10))
    assert sent(pair) == {3: 1}  # stream 1 has no window
    assert (second.sent_all, first.sent_all) == (1, 0)
    pair.say(window_update(0, 1_000_000), window_update(1, 40_000))
    assert sent(pair) == {1: 100_000 - DEFAULT_WINDOW}
    assert (first.sent_all, pair.connection.unsent) == (1, 0)


def test_a_new_initial_window_changes_open_streams_even_below_nothing(pair: Any) -> None:
    notes = pair.opened()
    pair.say(window_update(0, 1_000_000))
    pair.connection.send(notes.stream, bytes(DEFAULT_WINDOW + 10))
    assert sent(pair) == {1: DEFAULT_WINDOW}
    pair.say(settings({Setting.INITIAL_WINDOW_SIZE: 0}))
    assert notes.stream.send_window == -DEFAULT_WINDOW
    pair.say(window_update(1, DEFAULT_WINDOW))
    assert sent(pair) == {}
    pair.say(window_update(1, 4))
    assert sent(pair) == {1: 4}
    pair.say(settings({Setting.INITIAL_WINDOW_SIZE: DEFAULT_WINDOW}))
    assert sent(pair) == {1: 6}
    pair.say(window_update(1, MAX_WINDOW - 100_000), settings({Setting.INITIAL_WINDOW_SIZE: MAX_WINDOW}))
    assert pair.died_of() == Code.FLOW_CONTROL_ERROR


def test_streams_take_turns(pair: Any) -> None:
    streams = [pair.opened(number).stream for number in (1, 3, 5)]
    pair.connection.pause()
    for stream in streams:
        pair.connection.send(stream, bytes(40_000))
    pair.say(window_update(0, 1_000_000))
    assert sent(pair) == {}
    pair.connection.resume()
    order = [it.stream for it in pair.heard() if it.kind == DATA]
    assert order == [1, 3, 5] * 3


def test_a_stream_that_is_gone_waits_for_no_turn(pair: Any) -> None:
    """Else a peer that takes no data fills the memory: it opens streams and resets them, one after the other."""
    pair.connection.pause()
    unanswered, answered = pair.opened(1), pair.opened(3)
    pair.connection.send(answered.stream, b"x")
    pair.say(rst_stream(1, Code.CANCEL), rst_stream(3, Code.CANCEL))
    assert sys.getrefcount(answered.stream) == sys.getrefcount(unanswered.stream)
    pair.connection.resume()
    assert sent(pair) == {}


def test_what_is_idle_keeps_no_room_for_its_largest_answer(make_pair: Any) -> None:
    def resident_mb() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6

    def served() -> Any:
        pair = make_pair()
        pair.say(settings({Setting.INITIAL_WINDOW_SIZE: MAX_WINDOW}), window_update(0, MAX_WINDOW - DEFAULT_WINDOW))
        pair.connection.send(pair.opened().stream, bytes(limits.WRITE_BYTES))
        assert sum(sent(pair).values()) == limits.WRITE_BYTES
        return pair

    kept = [served()]
    before = resident_mb()
    kept += [served() for _ in range(30)]
    assert resident_mb() - before < 15


def answer_blocks(pair: Any, stream: int) -> list[bytes]:
    """The header blocks of one more answer."""
    notes, connection = pair.opened(stream), pair.connection
    connection.message(notes.stream, literal(":status", "200"), b"x")
    connection.end(notes.stream, literal("grpc-status", "0"))
    return [it.payload for it in pair.heard() if it.kind == HEADERS]


@pytest.mark.parametrize("size", [0, 100])
def test_who_shrinks_the_table_for_our_headers_is_agreed_with_first(make_pair: Any, size: int) -> None:
    """RFC 9113, section 4.3.1: else it must end the connection, as nghttp2 and the `hpack` package do."""
    pair, plain = make_pair(), [literal(":status", "200"), literal("grpc-status", "0")]
    assert answer_blocks(pair, 1) == plain
    pair.say(settings({Setting.HEADER_TABLE_SIZE: size}))
    pair.decoder.max_allowed_table_size = size
    first, second = answer_blocks(pair, 3)
    assert [pair.decoder.decode(block) for block in (first, second)] == [[(":status", "200")], [("grpc-status", "0")]]
    assert [first, second] != plain
    assert answer_blocks(pair, 5) == plain
    pair.say(settings({Setting.HEADER_TABLE_SIZE: 65_536}))
    assert answer_blocks(pair, 7) == plain


def test_the_smallest_of_several_tables_in_one_frame_is_agreed_with(make_pair: Any) -> None:
    """RFC 7541, section 4.2: the last one alone would hide that the peer dropped its entries."""
    pair, sizes = make_pair(), [settings({Setting.HEADER_TABLE_SIZE: size})[HEAD_BYTES:] for size in (0, 8_192)]
    pair.say(frame(SETTINGS, 0, 0, b"".join(sizes)))
    first, second = answer_blocks(pair, 1)
    assert first == NO_TABLE + literal(":status", "200")
    assert second == literal("grpc-status", "0")


def test_larger_frames_are_used_when_they_are_allowed(pair: Any) -> None:
    notes = pair.opened()
    pair.say(settings({Setting.MAX_FRAME_SIZE: 40_000}))
    pair.connection.send(notes.stream, bytes(50_000))
    assert [len(it.payload) for it in pair.heard() if it.kind == DATA] == [40_000, 10_000]


def test_the_end_waits_for_the_data(pair: Any, data: Any) -> None:
    notes = pair.opened()
    pair.say(data(b"", ends=True))
    pair.connection.send(notes.stream, bytes(DEFAULT_WINDOW + 1))
    pair.connection.end(notes.stream, b"\x88")
    assert [it.kind for it in pair.heard() if it.kind == HEADERS] == []
    pair.say(window_update(1, 1), window_update(0, 1))
    *_, last_data, end = pair.heard()
    assert (last_data.kind, last_data.flags, end.kind, end.flags) == (DATA, 0, HEADERS, END_HEADERS | END_STREAM)
    assert pair.connection.streams == {}
    assert not notes.resets


def test_an_answer_before_the_requests_end_asks_for_no_more(pair: Any, data: Any) -> None:
    notes = pair.opened()
    pair.connection.end(notes.stream, b"\x88")
    headers, reset = pair.heard()
    assert headers.flags == END_HEADERS | END_STREAM
    assert (reset.kind, reset.number) == (RST_STREAM, Code.NO_ERROR)
    pair.say(data(b"late", ends=True))
    assert pair.heard() == []


# --- flow control, towards us ---


def test_a_peer_that_oversteps_a_window_is_stopped(pair: Any, data: Any) -> None:
    notes = pair.opened()
    chunk = data(bytes(16_384))
    for _ in range(limits.STREAM_WINDOW // 16_384):
        pair.say(chunk)
    assert pair.reset_with() == []
    pair.say(data(b"x"))
    assert pair.reset_with() == [(1, Code.FLOW_CONTROL_ERROR)]
    assert notes.resets == [Code.FLOW_CONTROL_ERROR]


def test_windows_reopen_the_streams_as_data_is_used_and_the_connections_always(
    make_pair: Any, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CONNECTION_WINDOW", 2 * limits.STREAM_WINDOW)
    pair = make_pair()
    notes = pair.opened()
    total = limits.CONNECTION_WINDOW // 16_384 * 2
    for _ in range(total):
        pair.say(data(bytes(16_384)))
        pair.connection.consumed(notes.stream, 16_384)
    given: dict[int, int] = {}
    for it in pair.heard():
        if it.kind == WINDOW_UPDATE:
            given[it.stream] = given.get(it.stream, 0) + it.number
    assert given[0] == limits.CONNECTION_WINDOW * 2
    assert total * 16_384 - limits.STREAM_WINDOW <= given[1] <= total * 16_384
    assert not notes.resets


# --- floods ---


@pytest.mark.parametrize(
    "nuisance",
    [
        frame(PING, 0, 0, bytes(8)), settings({}), frame(PRIORITY, 0, 1, bytes(5)), frame(DATA, 0, 1, b""),
        window_update(0, 1), window_update(1, 1), frame(200, 0, 0), rst_stream(3, Code.CANCEL), goaway(0, Code.NO_ERROR),
    ],
)  # fmt: skip
def test_a_flood_of_frames_that_carry_nothing_ends_the_connection(pair: Any, nuisance: bytes) -> None:
    pair.opened(1)
    pair.opened(3)
    pair.connection.reset(3, Code.CANCEL)
    pair.say(*[nuisance] * 1_900)
    assert not pair.connection.closed
    pair.now += 5.0
    pair.say(*[nuisance] * 900)  # what comes slowly is no flood
    assert not pair.connection.closed
    pair.say(*[nuisance] * 5_000)
    assert pair.died_of() == Code.ENHANCE_YOUR_CALM
    assert pair.notes[0].resets == [Code.ENHANCE_YOUR_CALM]


def test_rapid_reset_ends_the_connection(pair: Any) -> None:
    stream = 1
    while not pair.connection.closed and stream < 100_000:
        pair.say(pair.request(stream), rst_stream(stream, Code.CANCEL))
        stream += 2
    assert pair.died_of() == Code.ENHANCE_YOUR_CALM
    assert 19_000 < len(pair.notes) < 21_000
    assert all(notes.resets for notes in pair.notes)


def test_having_us_reset_streams_is_rapid_reset_too(make_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2025-8671: a fault in each of them, behind a request that was begun."""
    monkeypatch.setattr(limits, "RESETS", limits.Rate(10, 1))
    pair = make_pair()
    for stream in range(1, 40, 2):
        if not pair.connection.closed:
            pair.opened(stream)
            pair.say(window_update(stream, 0))
    assert pair.connection.closed


def test_streams_that_were_answered_may_be_reset_at_any_rate(make_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Envoy ends every exchange."""
    monkeypatch.setattr(limits, "RESETS", limits.Rate(10, 1))
    pair = make_pair()
    for stream in range(1, 200, 2):
        pair.opened(stream)
        pair.connection.send(pair.connection.streams[stream], b"x")
        pair.say(rst_stream(stream, Code.CANCEL))
    assert not pair.connection.closed
    assert all(notes.resets == [Code.CANCEL] for notes in pair.notes)


@pytest.mark.parametrize("complete", [False, True])
def test_streams_that_we_ended_first_may_be_reset_at_any_rate(pair: Any, data: Any, complete: bool) -> None:
    """A refusal ends the call; the peer's own end crosses it."""
    for number in range(20_000):
        stream = 2 * number + 1
        notes = pair.opened(stream)
        if complete:
            pair.say(data(b"", stream, ends=True))
        pair.connection.end(notes.stream, b"\x88")
        if not complete:
            pair.say(data(b"", stream, ends=True))
        pair.say(rst_stream(stream, Code.CANCEL))
        pair.heard()
        pair.now += 0.002
    assert not pair.connection.closed


def test_resets_of_streams_that_we_ended_may_come_behind_all_that_a_window_holds(pair: Any) -> None:
    """As Envoy's do where it sends more than the gateway can answer."""
    streams = range(1, 2 * limits.CONNECTION_WINDOW // 2_600, 2)
    for stream in streams:
        pair.connection.end(pair.opened(stream).stream, b"\x88")
        pair.heard()
    for stream in streams:
        pair.say(rst_stream(stream, Code.NO_ERROR))
    assert not pair.connection.closed, pair.connection.fault


def test_the_end_of_a_stream_that_we_ended_is_free_once(pair: Any, data: Any) -> None:
    pair.connection.end(pair.opened(1).stream, b"\x88")
    pair.say(*[data(b"", ends=True), rst_stream(1, Code.CANCEL)] * 1_000)
    assert not pair.connection.closed
    pair.say(*[rst_stream(1, Code.CANCEL)] * 3)
    assert pair.died_of() == Code.ENHANCE_YOUR_CALM


def test_the_last_data_of_a_stream_that_we_ended_is_free_once(pair: Any, data: Any) -> None:
    pair.connection.end(pair.opened(1).stream, b"\x88")
    pair.say(*[data(b"", ends=True)] * 2_000)
    assert not pair.connection.closed
    pair.say(*[data(b"", ends=True)] * 2)
    assert pair.died_of() == Code.ENHANCE_YOUR_CALM


def test_windows_of_many_streams_cannot_be_changed_again_and_again(make_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RESIZES", limits.Rate(1_000, 100))
    pair = make_pair()
    for number in range(100):
        pair.opened(2 * number + 1)
    for size in range(10):
        pair.say(*[settings({Setting.INITIAL_WINDOW_SIZE: size})] * 50)  # the same again is no change
    assert not pair.connection.closed
    pair.now += 1.0
    pair.say(settings({Setting.INITIAL_WINDOW_SIZE: 10}))
    assert not pair.connection.closed
    pair.say(settings({Setting.INITIAL_WINDOW_SIZE: 11}))
    assert pair.died_of() == Code.ENHANCE_YOUR_CALM


def test_clients_that_leave_are_no_rapid_reset(pair: Any, data: Any) -> None:
    for number in range(30_000):
        notes = pair.opened(2 * number + 1)
        if number % 2:
            pair.say(rst_stream(2 * number + 1, Code.CANCEL))
        else:
            pair.connection.end(notes.stream, b"\x88")
        pair.heard()
    assert not pair.connection.closed


def test_a_block_that_cannot_be_read_is_named_without_an_address(pair: Any) -> None:
    pair.say(frame(HEADERS, END_HEADERS, 1, b"\xff" * 6))
    assert pair.died_of() == Code.COMPRESSION_ERROR
    assert pair.connection.fault == "a header block that cannot be read"


def test_header_blocks_without_end(pair: Any) -> None:
    pair.say(frame(HEADERS, 0, 1, b""), *[frame(CONTINUATION, 0, 1, b"")] * limits.MAX_BLOCK_FRAMES)
    assert pair.died_of() == Code.ENHANCE_YOUR_CALM


def test_header_blocks_that_are_too_large(make_pair: Any) -> None:
    pair = make_pair()
    pair.say(frame(HEADERS, 0, 1, bytes(16_000)), *[frame(CONTINUATION, 0, 1, bytes(16_000))] * 4)
    assert pair.died_of() == Code.ENHANCE_YOUR_CALM
    pair = make_pair()
    pair.say(pair.request(fields=[*fields(), ("x", "y" * 15_000)]))
    assert not pair.connection.closed
    pair = make_pair()
    pair.encoder.header_table_size = 4096
    bomb = pair.block([*fields(), *[("x", "y" * 3_900)] * 40])  # forty large fields in a few bytes, by the dynamic table
    assert len(bomb) < 8_000
    pair.say(frame(HEADERS, END_HEADERS, 3, bomb))
    assert pair.died_of() == Code.ENHANCE_YOUR_CALM


def test_unread_answers_are_bounded(make_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_UNSENT_BYTES", 1_000_000)
    pair = make_pair()
    for number in range(200):
        pair.connection.send(pair.opened(2 * number + 1).stream, bytes(10_000))
        if pair.connection.closed:
            break
    assert pair.died_of() == Code.ENHANCE_YOUR_CALM


# --- time ---


def test_a_silent_peer_is_asked_and_then_given_up(pair: Any) -> None:
    notes = pair.opened()
    pair.heard()
    pair.connection.tick(pair.now + limits.IDLE_PING_S - 1)
    assert pair.heard() == []
    pair.connection.tick(pair.now + limits.IDLE_PING_S + 1)
    pair.connection.tick(pair.now + limits.IDLE_PING_S + 2)
    assert [it.kind for it in pair.heard()] == [PING]
    pair.now += limits.IDLE_PING_S + 3
    pair.say(frame(PING, ACK, 0, b"penstock"))
    pair.connection.tick(pair.now + limits.SILENCE_S - 1)
    assert not pair.connection.closed
    pair.connection.tick(pair.now + limits.SILENCE_S + 1)
    assert pair.died_of() == Code.NO_ERROR
    assert notes.resets


def test_a_peer_that_gives_no_window_for_long_is_given_up(pair: Any) -> None:
    notes = pair.opened()
    pair.connection.send(notes.stream, bytes(DEFAULT_WINDOW + 1))
    for _ in range(12):
        pair.now += limits.STALL_S / 10
        pair.say(frame(PING, ACK, 0, bytes(8)))
        pair.connection.tick(pair.now)
    assert pair.died_of() == Code.ENHANCE_YOUR_CALM
    assert notes.resets == [Code.ENHANCE_YOUR_CALM]


def test_blocks_that_never_come_again_push_out_none_that_do() -> None:
    reader, usual = BlockReader(BlockCache()), literal("user-agent", "envoy")
    reader.read(NO_TABLE)
    heads = [reader.read(usual)]
    for number in range(1_000):
        trace = f"00-{number:032x}-{number:016x}-01"
        assert reader.read(usual + literal("traceparent", trace)).get("traceparent") == trace
        if not number % 100:
            heads.append(reader.read(usual))
    assert len({id(head) for head in heads}) == 1, "read once"


NAMES = st.sampled_from([":path", "traceparent", "x-a", "content-length", "cookie", "te", "accept"])
VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=300)


@given(
    st.lists(st.tuples(NAMES, VALUES), max_size=12),
    st.booleans(),
    st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=2),
)
def test_a_block_read_field_by_field_says_what_it_says_as_a_whole(
    fields: list[tuple[str, str]], huffman: bool, damage: list[tuple[int, int]]
) -> None:
    encoder = Encoder()
    encoder.header_table_size = 0
    whole, cache = Decoder(max_header_list_size=limits.MAX_LIST_BYTES), BlockCache()
    reader = BlockReader(cache)
    whole.decode(NO_TABLE)
    reader.read(NO_TABLE)
    whole.max_allowed_table_size = 0  # as of a reader whose peer keeps no table
    block = bytearray(encoder.encode(fields, huffman=huffman).removeprefix(NO_TABLE))
    for at, byte in damage:
        if block:
            block[at % len(block)] = byte
    try:
        expected: Any = read_fields(list(whole.decode(bytes(block), raw=True)))
    except HPACKError:
        with pytest.raises(ConnectionFault):
            reader.read(bytes(block))
        return
    for _ in range(2):
        assert reader.read(bytes(block)) == expected
        cache.heads = type(cache.heads)(1)  # what is left are the fields


def test_fields_that_come_again_are_read_once_beside_one_that_never_does(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = BlockReader(BlockCache())
    reader.read(NO_TABLE)
    decoded: list[bytes] = []
    decode = Decoder.decode
    monkeypatch.setattr(Decoder, "decode", lambda self, data, raw=False: decoded.append(data) or decode(self, data, raw))
    usual = literal("user-agent", "envoy") + literal("te", "trailers")
    for number in range(50):
        reader.read(usual + literal("traceparent", str(number)))
    assert len(decoded) == 2 + 50


def test_a_list_that_is_too_long_in_all_is_refused_though_each_of_its_fields_is_short() -> None:
    reader = BlockReader(BlockCache())
    reader.read(NO_TABLE)
    field = literal("cookie", "c" * 900)
    reader.read(field)
    with pytest.raises(ConnectionFault, match="headers of more than"):
        reader.read(field * (limits.MAX_LIST_BYTES // 900 + 1))


def test_a_block_of_many_fields_is_not_cut_into_them(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = BlockReader(BlockCache())
    reader.read(NO_TABLE)
    decoded: list[bytes] = []
    decode = Decoder.decode
    monkeypatch.setattr(Decoder, "decode", lambda self, data, raw=False: decoded.append(data) or decode(self, data, raw))
    block = b"\x82" * limits.MAX_LIST_BYTES
    with pytest.raises(ConnectionFault, match="headers of more than"):
        reader.read(block)
    assert decoded == [block], "the package stops at the limit"
