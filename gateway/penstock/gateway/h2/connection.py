"""The server's side of one HTTP/2 connection (RFC 9113): bytes in, bytes out, no I/O and no clock.

Nothing that a peer sends makes `receive` raise: a fault in a stream resets the stream, one in the connection ends it with GOAWAY.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from penstock.gateway.h2 import frames, limits
from penstock.gateway.h2.blocks import BlockCache, BlockReader, Head
from penstock.gateway.h2.egress import Egress
from penstock.gateway.h2.frames import ACK, END_HEADERS, END_STREAM, PADDED, Code, ConnectionFault, Setting, StreamFault
from penstock.gateway.h2.limits import Bucket
from penstock.gateway.h2.messages import prefixed
from penstock.gateway.h2.stream import Receiver, Stream

_T = TypeVar("_T")

Accept = Callable[[Stream], Receiver | None]
"""Takes a new stream; None refuses it, since there are too many."""
_CODES = {int(code): code for code in Code}
_HEAD_BYTES, _unpack_head = frames.HEAD_BYTES, frames.HEAD.unpack_from
_OURS = {
    Setting.HEADER_TABLE_SIZE: 0,
    Setting.MAX_CONCURRENT_STREAMS: limits.MAX_STREAMS,
    Setting.INITIAL_WINDOW_SIZE: limits.STREAM_WINDOW,
    Setting.MAX_HEADER_LIST_SIZE: limits.MAX_LIST_BYTES,
    Setting.NO_RFC7540_PRIORITIES: 1,
}


class Connection:
    """One connection. `now` is monotonic seconds.

    Args:
        accept: Who takes new streams.
        cache: Header blocks that other connections have seen.
        now: The time.
    """

    def __init__(self, accept: Accept, cache: BlockCache, now: float) -> None:
        self.streams: dict[int, Stream] = {}
        """Streams that we have not ended yet."""
        self._header_bytes = 0
        """What the header lists of `streams` take."""
        self._egress = Egress(self._finished, now)
        self.closed = False
        """Ended by a fault: what is to be taken is the last."""
        self.fault = ""
        self._out = self._egress.out
        self._out += [frames.settings(_OURS), frames.window_update(0, limits.CONNECTION_WINDOW - frames.DEFAULT_WINDOW)]
        self._accept = accept
        self._blocks = BlockReader(cache)
        self._buffer = b""
        self._greeted = self._configured = False
        self._header: tuple[int, int] | None = None  # stream and flags of a header block that goes on
        self._block, self._block_frames = bytearray(), 0
        self._last_id = 0
        # In order: what is forgotten is the first, and in a plain dictionary whose first are gone that is searched for.
        self._was_reset = OrderedDict[int, None]()  # by us, not long ago: the peer may not know yet
        self._farewells = OrderedDict[int, bool]()  # ended by us: its end may still cross ours; whether its last DATA may, too
        self.receive_window, self._unacknowledged = limits.CONNECTION_WINDOW, 0
        self._now = self._heard_at = now
        self._pinged = False
        self._control, self._resets = Bucket(limits.CONTROL, now), Bucket(limits.RESETS, now)
        self._resizes = Bucket(limits.RESIZES, now)
        self._updates = 0
        self._handlers = (
            self._data, self._headers, self._priority, self._rst_stream, self._settings,
            self._push_promise, self._ping, self._goaway, self._window_update, self._continuation,
        )  # fmt: skip

    @property
    def urgent(self) -> bool:
        """Somebody waits for what is to be taken: as far as is known here, always."""
        return bool(self._out)

    @property
    def patient(self) -> bool:
        """There is something to take, for which nobody waits."""
        return False

    @property
    def paused(self) -> bool:
        """The peer does not read."""
        return self._egress.paused

    @property
    def unsent(self) -> int:
        """Bytes of all streams that wait."""
        return self._egress.unsent

    @property
    def max_frame(self) -> int:
        """The largest frame that the peer takes."""
        return self._egress.max_frame

    # --- what comes ---

    def receive(self, data: bytes, now: float) -> None:
        """Takes in what the peer has sent."""
        if self.closed:
            return
        self._now = self._heard_at = now
        self._pinged = False
        self._buffer = buffer = self._buffer + data if self._buffer else data
        try:
            at, end = 0 if self._greeted else self._begin(buffer), len(buffer)
            while end - at >= _HEAD_BYTES and self._greeted and not self.closed:
                high, low, kind, flags, stream_id = _unpack_head(buffer, at)
                size = high << 8 | low
                if size > frames.MIN_FRAME_BYTES:
                    raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"a frame of {size} bytes")
                start = at + _HEAD_BYTES
                if start + size > end:
                    break
                at = start + size
                self._frame(kind, flags, stream_id & frames.MAX_ID, buffer[start:at])
            self._buffer = buffer[at:]
        except ConnectionFault as fault:
            self.fail(fault.code, str(fault))

    def _begin(self, buffer: bytes) -> int:
        """Return the offset of the first frame in `buffer`, after the connection preface."""
        if not frames.PREFACE.startswith(buffer[: len(frames.PREFACE)]):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "this is a port for HTTP/2")
        self._greeted = len(buffer) >= len(frames.PREFACE)
        return len(frames.PREFACE) if self._greeted else 0

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self._header is not None and (kind != frames.CONTINUATION or stream_id != self._header[0]):
            raise ConnectionFault(Code.PROTOCOL_ERROR, "a header block was not ended")
        if not self._configured:
            if kind != frames.SETTINGS or flags & ACK:
                raise ConnectionFault(Code.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self._configured = True
        if kind > frames.CONTINUATION:
            return self._tax()
        try:
            self._handlers[kind](flags, stream_id, payload)
        except StreamFault as fault:
            # To have us reset a stream is to reset it (CVE-2025-8671): what it asked for was begun.
            if (stream := self.streams.get(stream_id)) is not None:
                self._take_reset(stream)
            self.reset(stream_id, fault.code)
        return None

    def _data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        self.receive_window -= size
        self._unacknowledged += size
        if self._unacknowledged >= limits.CONNECTION_WINDOW // 2 or self.receive_window < 0:
            self._reopen()
        stream = self.streams.get(stream_id)
        if stream is None or stream.ended:
            if not payload and flags & END_STREAM and self._farewells.get(stream_id):
                self._farewells[stream_id] = False
                return None
            return self._late(stream_id, "DATA")
        stream.receive_window -= size
        if stream.receive_window < 0:
            raise StreamFault(Code.FLOW_CONTROL_ERROR, "more data than the stream's window")
        data = payload
        if flags & PADDED:
            data = frames.unpadded(payload)
            self.consumed(stream, size - len(data))
        if stream.content_length is not None:
            stream.content_length -= len(data)
            if stream.content_length < 0:
                raise StreamFault(Code.PROTOCOL_ERROR, "more data than content-length")
        if data:
            assert stream.receiver is not None
            stream.receiver.data(data)
        elif not flags & END_STREAM:
            self._tax()
        if flags & END_STREAM and stream.open:
            self._end(stream)
        return None

    def _reopen(self) -> None:
        """Reopen the connection's window at once: each stream has a window of its own, and an unread stream must not stop the
        others."""
        if self.receive_window < 0:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "more data than the connection's window")
        self._out.append(frames.window_update(0, self._unacknowledged))
        self.receive_window += self._unacknowledged
        self._unacknowledged = 0

    def _end(self, stream: Stream) -> None:
        if stream.content_length:
            raise StreamFault(Code.PROTOCOL_ERROR, "less data than content-length")
        stream.ended = True
        assert stream.receiver is not None
        stream.receiver.end()

    def _late(self, stream_id: int, kind: str) -> None:
        """A frame for a stream that does not take it any more, or not yet."""
        self._known(stream_id, kind)
        self._tax()
        if stream_id not in self._was_reset:
            raise StreamFault(Code.STREAM_CLOSED, f"{kind} for a stream that is closed")

    def _known(self, stream_id: int, kind: str) -> None:
        if stream_id > self._last_id or not stream_id % 2:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"{kind} for stream {stream_id}, which was never opened")

    def _headers(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id % 2:
            raise ConnectionFault(Code.PROTOCOL_ERROR, f"HEADERS for stream {stream_id}")
        if flags & PADDED:
            payload = frames.unpadded(payload)
        if flags & frames.WITH_PRIORITY:
            if len(payload) < 5:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "HEADERS without the priority that they announce")
            payload = payload[5:]
        if flags & END_HEADERS:
            return self._request(stream_id, bool(flags & END_STREAM), payload)
        self._header, self._block, self._block_frames = (stream_id, flags), bytearray(payload), 1
        return None

    def _continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        if self._header is None:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "CONTINUATION of nothing")
        self._block += payload
        self._block_frames += 1
        if len(self._block) > limits.MAX_BLOCK_BYTES or self._block_frames > limits.MAX_BLOCK_FRAMES:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "a header block that does not end")
        if flags & END_HEADERS:
            (_, first), self._header = self._header, None
            self._request(stream_id, bool(first & END_STREAM), bytes(self._block))

    def _request(self, stream_id: int, ends: bool, block: bytes) -> None:
        """A complete header block: a request's, or its trailers."""
        fields = self._blocks.read(block)
        stream = self.streams.get(stream_id)
        if stream is not None:
            if stream.ended:
                raise StreamFault(Code.STREAM_CLOSED, "HEADERS after the end")
            if not ends or fields.pseudo or fields.malformed:
                raise StreamFault(Code.PROTOCOL_ERROR, "trailers that are none")
            return self._end(stream)
        if stream_id <= self._last_id:
            if stream_id not in self._was_reset:
                raise ConnectionFault(Code.PROTOCOL_ERROR, f"stream {stream_id} is opened after {self._last_id}")
            return self._tax()
        self._last_id = stream_id
        return self._open(stream_id, ends, fields)

    def _open(self, stream_id: int, ends: bool, fields: Head) -> None:
        if fields.malformed or fields.missing:
            self._tax()
            raise StreamFault(Code.PROTOCOL_ERROR, fields.malformed or f"no {fields.missing}")
        stream = Stream(stream_id, fields, self._egress.initial_window, limits.STREAM_WINDOW)
        room = len(self.streams) < limits.MAX_STREAMS and self._header_bytes + fields.size <= limits.MAX_HEADER_BYTES
        receiver = self._accept(stream) if room else None
        if receiver is None:
            self._tax()
            raise StreamFault(Code.REFUSED_STREAM, "too many streams")
        stream.receiver = receiver
        self.streams[stream_id] = stream
        self._header_bytes += fields.size
        if ends:
            self._end(stream)

    def _priority(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PRIORITY for no stream")
        if len(payload) != 5:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"PRIORITY of {len(payload)} bytes")
        self._tax()

    def _rst_stream(self, flags: int, stream_id: int, payload: bytes) -> None:
        code = frames.word("RST_STREAM", payload)
        self._known(stream_id, "RST_STREAM")
        stream = self.streams.get(stream_id)
        if stream is None:
            return None if self._farewells.pop(stream_id, None) is not None else self._tax()
        self._take_reset(stream)
        return self._gone(stream, _CODES.get(code, Code.INTERNAL_ERROR))

    def _settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "SETTINGS for a stream")
        self._tax()
        if flags & ACK:
            if payload:
                raise ConnectionFault(Code.FRAME_SIZE_ERROR, "an acknowledgement of SETTINGS that says something")
            return
        said = frames.read_settings(payload)
        values = dict(said)
        window = values.get(Setting.INITIAL_WINDOW_SIZE)
        self._egress.max_frame = values.get(Setting.MAX_FRAME_SIZE, self._egress.max_frame)
        for table in (value for name, value in said if name == Setting.HEADER_TABLE_SIZE):
            self._egress.resize_table(table)
        self._out.append(frames.frame(frames.SETTINGS, ACK, 0))
        if window is not None and window != self._egress.initial_window:
            if not self._resizes.take(self._now, len(self.streams)):
                raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many changes of the windows of open streams")
            self._egress.resize(window, list(self.streams.values()), self._now)

    def _push_promise(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise ConnectionFault(Code.PROTOCOL_ERROR, "PUSH_PROMISE from a client")

    def _ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "PING for a stream")
        if len(payload) != 8:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"PING of {len(payload)} bytes")
        self._tax()
        if not flags & ACK:
            self._out.append(frames.frame(frames.PING, ACK, 0, payload))

    def _goaway(self, flags: int, stream_id: int, payload: bytes) -> None:
        """The peer will open no more streams, and close the connection when it likes."""
        if stream_id:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "GOAWAY for a stream")
        if len(payload) < 8:
            raise ConnectionFault(Code.FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes")
        self._tax()

    def _window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        more = frames.word("WINDOW_UPDATE", payload) & frames.MAX_WINDOW
        self._updates += 1
        if self._updates > limits.UPDATES_A_FRAME * self._egress.frames_sent:
            self._tax()
        if not stream_id:
            return self._egress.grow(more, self._now)
        if (stream := self.streams.get(stream_id)) is not None:
            return self._egress.grow_stream(stream, more, self._now)
        return self._known(stream_id, "WINDOW_UPDATE")

    def _tax(self) -> None:
        if not self._control.take(self._now):
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many frames that carry nothing")

    # --- what goes ---

    def consumed(self, stream: Stream, size: int) -> None:
        """Bytes of a stream were used up: the peer may send as many more, once they are worth a frame."""
        stream.unacknowledged += size
        if stream.unacknowledged >= limits.STREAM_WINDOW // 2 and stream.open and not stream.ended:
            self._out.append(frames.window_update(stream.id, stream.unacknowledged))
            stream.receive_window += stream.unacknowledged
            stream.unacknowledged = 0

    def send(self, stream: Stream, data: bytes) -> None:
        """Sends `data` when the windows allow it."""
        egress = self._egress
        egress.data(stream, data, self._now)
        if egress.unsent > limits.MAX_UNSENT_BYTES:
            self.fail(Code.ENHANCE_YOUR_CALM, "answers are not read")

    def message(self, stream: Stream, block: bytes, message: bytes) -> None:
        """Sends a message of gRPC, after the head of the answer: `block`, which fits one frame, and is empty where the head was
        sent before."""
        if block:
            self._egress.headers(stream, block)
        self.send(stream, prefixed(message))

    def end(self, stream: Stream, block: bytes) -> None:
        """Ends the stream with trailers, after all data; `block` fits one frame."""
        self._egress.end(stream, block)

    def reset(self, stream_id: int, code: Code) -> None:
        """Ends a stream at once."""
        self._out.append(frames.rst_stream(stream_id, code))
        _keep(self._was_reset, stream_id, None)
        stream = self.streams.get(stream_id)
        if stream is not None:
            _keep(self._farewells, stream_id, not stream.ended)
            self._gone(stream, code)

    def take(self) -> bytes:
        """What is to be written now."""
        data = b"".join(self._out)
        self._out.clear()
        return data

    def flushed(self) -> bool:
        """What was taken is written; whether there is more now."""
        self._egress.flushed(self._now)
        return bool(self._out)

    def pause(self) -> None:
        """The peer does not read."""
        self._egress.paused = True

    def resume(self) -> None:
        """The peer reads again."""
        self._egress.paused = False
        self._egress.pump(self._now)

    def tick(self, now: float) -> None:
        """Ping a silent peer, and close the connection to one that does not answer or does not read. Call this every few
        seconds."""
        self._now = now
        if self.closed:
            return
        silent = now - self._heard_at
        if silent > limits.SILENCE_S:
            self.fail(Code.NO_ERROR, "no sign of life")
        elif self._egress.unsent and now - self._egress.progress_at > limits.STALL_S:
            self.fail(Code.ENHANCE_YOUR_CALM, "answers are not read")
        elif silent > limits.IDLE_PING_S and not self._pinged:
            self._pinged = True
            self._out.append(frames.frame(frames.PING, 0, 0, b"penstock"))

    def leave(self) -> None:
        """Asks the peer to open no more streams here."""
        self._out.append(frames.goaway(frames.MAX_ID, Code.NO_ERROR))

    def fail(self, code: Code, message: str) -> None:
        """Ends the connection: all streams are gone, and a GOAWAY says why."""
        if self.closed:
            return
        self.closed, self.fault = True, message
        self._out.append(frames.goaway(self._last_id, code, message))
        for stream in list(self.streams.values()):
            self._gone(stream, code)

    def _finished(self, stream: Stream) -> None:
        """End a stream after our trailers. The rest of the peer's message is not needed."""
        if not stream.ended:
            self._out.append(frames.rst_stream(stream.id, Code.NO_ERROR))
            _keep(self._was_reset, stream.id, None)
        _keep(self._farewells, stream.id, not stream.ended)
        self._forget(stream)
        self._resets.give()

    def _take_reset(self, stream: Stream) -> None:
        # Envoy ends each exchange so, after our answers: a stream that we have answered was not opened to be reset.
        if not stream.answered and not self._resets.take(self._now):
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, "too many streams are opened to be reset")

    def _gone(self, stream: Stream, code: Code) -> None:
        self._forget(stream)
        self._egress.drop(stream)
        assert stream.receiver is not None
        stream.receiver.reset(code)

    def _forget(self, stream: Stream) -> None:
        del self.streams[stream.id]
        self._header_bytes -= stream.head.size


def _keep(recent: OrderedDict[int, _T], stream_id: int, value: _T) -> None:
    """Forgets the oldest where there are too many."""
    recent[stream_id] = value
    if len(recent) > limits.ENDED_KEPT:
        recent.popitem(last=False)
