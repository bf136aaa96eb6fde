"""The half of a connection that sends: windows, turns, and what waits for them."""

from collections import OrderedDict
from collections.abc import Callable

from penstock.gateway.h2 import limits
from penstock.gateway.h2.blocks import NO_TABLE
from penstock.gateway.h2.frames import (
    DATA,
    DEFAULT_TABLE_BYTES,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAX_WINDOW,
    MIN_FRAME_BYTES,
    Code,
    ConnectionFault,
    StreamFault,
    frame,
    head,
)
from penstock.gateway.h2.stream import Stream


class Egress:
    """Sends what the peer's windows allow, one frame of each stream in turn.

    Args:
        finished: Called with each stream whose trailers were sent.
        now: Monotonic seconds.
    """

    def __init__(self, finished: Callable[[Stream], None], now: float) -> None:
        self.out: list[bytes] = []
        """Frames to write. The writer empties the list."""
        self.paused = False
        """The peer does not read: no data goes into `out`."""
        self.unsent = 0
        """Bytes of all streams that wait."""
        self.progress_at = now
        """When data last went out, or began to wait."""
        self.initial_window = DEFAULT_WINDOW
        self.max_frame = MIN_FRAME_BYTES
        self.frames_sent = 0
        self._table_bytes = DEFAULT_TABLE_BYTES  # of the peer's table for our header blocks
        self._block_begins = b""  # what our next header block has to begin with
        self._finished = finished
        self._window = DEFAULT_WINDOW
        self._room = limits.WRITE_BYTES
        self._turns: OrderedDict[int, Stream] = OrderedDict()  # streams that have data and a window

    def headers(self, stream: Stream, block: bytes) -> None:
        """The head of the answer; `block` fits one frame."""
        if stream.open:
            self.out.append(frame(HEADERS, END_HEADERS, stream.id, self._begun(block)))

    def data(self, stream: Stream, data: bytes, now: float) -> None:
        """Sends `data` when the windows allow it, in frames as large as the peer takes."""
        if not stream.open or not data:
            return None
        if not self.unsent:
            self.progress_at = now
            size = len(data)
            if size <= min(stream.send_window, self._window, self.max_frame, self._room) and not self.paused:
                return self._write(stream, data, size)  # what nearly always happens
        stream.waiting += data
        self.unsent += len(data)
        self._queue(stream)
        return self.pump(now)

    def end(self, stream: Stream, block: bytes) -> None:
        """Ends the stream with trailers, after all data; `block` fits one frame."""
        if not stream.open:
            return
        stream.trailers = block
        if not stream.waiting:
            self._finish(stream)

    def drop(self, stream: Stream) -> None:
        """The stream is gone."""
        stream.open = False
        self._turns.pop(stream.id, None)  # its turn may never come: whoever takes no data may still open and reset streams
        self.unsent -= len(stream.waiting)
        stream.waiting.clear()

    def grow(self, more: int, now: float) -> None:
        """The peer takes `more` bytes on the connection."""
        if not more:
            raise ConnectionFault(Code.PROTOCOL_ERROR, "WINDOW_UPDATE by nothing")
        self._window += more
        if self._window > MAX_WINDOW:
            raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a window beyond all bounds")
        if self._turns:
            self.pump(now)

    def grow_stream(self, stream: Stream, more: int, now: float) -> None:
        """The peer takes `more` bytes on a stream."""
        if not more:
            raise StreamFault(Code.PROTOCOL_ERROR, "WINDOW_UPDATE by nothing")
        stream.send_window += more
        if stream.send_window > MAX_WINDOW:
            raise StreamFault(Code.FLOW_CONTROL_ERROR, "a window beyond all bounds")
        self._queue(stream)
        self.pump(now)

    def resize(self, size: int, streams: list[Stream], now: float) -> None:
        """The peer has another INITIAL_WINDOW_SIZE; the windows of open streams change with it, even below nothing."""
        more, self.initial_window = size - self.initial_window, size
        for stream in streams:
            stream.send_window += more
            if stream.send_window > MAX_WINDOW:
                raise ConnectionFault(Code.FLOW_CONTROL_ERROR, "a window beyond all bounds")
            self._queue(stream)
        self.pump(now)

    def resize_table(self, size: int) -> None:
        """The peer keeps a dynamic table of that size for our blocks, which use none. It takes a smaller one for an error unless
        the next block begins by agreeing (RFC 9113, section 4.3.1)."""
        if size < self._table_bytes:
            self._block_begins = NO_TABLE
        self._table_bytes = size

    def pump(self, now: float) -> None:
        """Sends what can be sent."""
        while self._turns and self._window > 0 and self._room > 0 and not self.paused:
            _, stream = self._turns.popitem(last=False)
            size = min(len(stream.waiting), stream.send_window, self._window, self.max_frame)
            if size <= 0:  # its window has shrunk
                continue
            self._write(stream, bytes(stream.waiting[:size]), size)
            del stream.waiting[:size]
            self.unsent -= size
            self.progress_at = now
            if stream.waiting:
                self._queue(stream)
            elif stream.trailers is not None:
                self._finish(stream)
            else:
                assert stream.receiver is not None
                stream.receiver.sent()

    def flushed(self, now: float) -> None:
        """What was in `out` is written."""
        self._room = limits.WRITE_BYTES
        if self._turns:
            self.pump(now)

    def _write(self, stream: Stream, data: bytes, size: int) -> None:
        self.out += (head(DATA, 0, stream.id, size), data)
        stream.answered = True
        stream.send_window -= size
        self._window -= size
        self._room -= size
        self.frames_sent += 1

    def _queue(self, stream: Stream) -> None:
        if stream.waiting and stream.send_window > 0:
            self._turns[stream.id] = stream

    def _finish(self, stream: Stream) -> None:
        assert stream.trailers is not None
        self.out.append(frame(HEADERS, END_HEADERS | END_STREAM, stream.id, self._begun(stream.trailers)))
        stream.open = False
        self._finished(stream)

    def _begun(self, block: bytes) -> bytes:
        """`block`, after what has to be said first."""
        if self._block_begins:
            block, self._block_begins = self._block_begins + block, b""
        return block
