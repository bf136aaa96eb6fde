"""An Envoy's side of ext_proc without an Envoy: one connection, and what became of each request.

It knows as much HTTP/2 as its peer needs: our gateway, which says nothing unusual. The `h2` package takes longer for a request
than the gateway does.
"""

import asyncio
import functools
import re
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

from hpack import Encoder

from benchmarks.gatewaybench.texts import FILLER, chat_body, own_prompt, pages
from benchmarks.pickerbench.proxy import HEAD, PHASE, REQUEST, data_frames, said, shown
from penstock.api import headers, load_report
from penstock.api.load_report import LoadReport
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
from penstock.gateway.h2 import frames
from penstock.gateway.h2.frames import END_HEADERS, END_STREAM, Code, Setting

ANSWERED = ""
"""In place of the reason for a refusal."""
ENDED, RESET, CLOSED = "ended without an answer", "reset", "connection closed"
"""What may become of a request that is lost."""
LOST = (ENDED, RESET, CLOSED)
PROMPT_BYTES = 1_900
UPDATE_BYTES = 2**20
"""Bytes of answers after which the peer hears that it may send more."""
PLACE = re.compile(rb"x-gateway-destination-endpoint.*?(127\.[0-9.]+:[0-9]+)", re.DOTALL)
BOOKING = re.compile(rb"booking.*?([0-9a-f]{8}-[0-9a-f]+)", re.DOTALL)
ID, OLD_LENGTH = dict(REQUEST)[headers.REQUEST_ID].encode(), dict(REQUEST)["content-length"].encode()
_MARK = "0123456789abcdef" * 4


@dataclass(slots=True)
class Asked:
    """One request."""

    number: int
    """Order in which requests were sent."""
    priority: int
    intended: float
    """When it was to be sent."""
    settled: float = 0.0
    outcome: str | None = None
    """`ANSWERED`, the reason for the refusal, or one of `LOST`; None: nothing has come yet."""
    served: str = ""
    booking: str = ""

    @property
    def request_id(self) -> str:
        """Its `x-request-id`."""
        return f"{ID[:-12].decode()}{self.number:012x}"


class Prompts:
    """Requests by priority, each with a prompt of its own. Only priorities other than the default are named in the body."""

    def __init__(self) -> None:
        self._texts = pages()
        self._parts = {priority: self._made(priority) for priority in (0, 1, 2)}

    @staticmethod
    def _made(priority: int) -> tuple[bytes, bytes, bytes]:
        """The message of the headers, and that of the body before and after the prompt."""
        filler = FILLER * PROMPT_BYTES
        body = chat_body(filler.decode())
        if priority:
            body = body[:-1] + b', "priority": %d}' % priority
        first, second = said(body)
        length = str(len(body)).encode()
        assert len(length) == len(OLD_LENGTH)  # else the lengths in the message would be wrong
        before, _, after = second.partition(filler)
        return first.replace(OLD_LENGTH, length), before, after

    def of(self, number: int, priority: int) -> tuple[bytes, bytes]:
        """The two messages of a request."""
        first, before, after = self._parts[priority]
        ident = ID[:-12] + b"%012x" % number
        return first.replace(ID, ident), before + own_prompt(self._texts, number, PROMPT_BYTES) + after


class Held(NamedTuple):
    """A request that a simulated replica answers later."""

    due: float
    asked: Asked


class Streams(asyncio.Protocol):
    """The connection.

    Args:
        prompts: Makes the requests.
        report: What each simulated replica says of itself with each of its answers.
    """

    def __init__(self, prompts: Prompts, report: LoadReport) -> None:
        self._prompts = prompts
        self._report = load_report.encode(report, "TEXT")
        self.answer_after_s: float | None = 0.0
        """How long replicas take to answer; None: until `answer` says so."""
        self.on_answer: Callable[[Asked], None] = lambda asked: None
        """Called with each request that a replica has answered."""
        self.on_settled: Callable[[Asked], None] = lambda asked: None
        self.settled: list[Asked] = []
        """In the order in which the gateway said so."""
        self.held: deque[Held] = deque()
        """What replicas have not answered yet."""
        self.count = 0
        self._open: dict[int, Asked] = {}
        self._stream = -1
        self._input, self._output = b"", bytearray()
        self._kept: deque[bytes] = deque()
        """Requests for which the peer has given no window yet."""
        self._window, self._unsaid = frames.DEFAULT_WINDOW, 0
        self._done = asyncio.get_running_loop().create_future()
        encoder = Encoder()
        encoder.header_table_size = 0
        self._first, self._requests, self._responses = (encoder.encode(it) for it in ([*HEAD, PHASE], [*HEAD, PHASE], HEAD))

    # --- asyncio's ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the connection."""
        self._transport = cast(asyncio.Transport, transport)
        ours = frames.settings({Setting.INITIAL_WINDOW_SIZE: 2**28})
        self._transport.write(frames.PREFACE + ours + frames.window_update(0, 2**30))

    def connection_lost(self, exc: Exception | None) -> None:
        """What is open is lost."""
        for stream in list(self._open):
            self._settle(stream, CLOSED)
        if not self._done.done():
            self._done.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Take in bytes."""
        data, at = self._input + data, 0
        while at + frames.HEAD_BYTES <= len(data):
            upper, lower, kind, flags, stream = frames.HEAD.unpack_from(data, at)
            ends = at + frames.HEAD_BYTES + (upper << 8 | lower)
            if ends > len(data):
                break
            self._frame(kind, flags, stream, data[at + frames.HEAD_BYTES : ends])
            at = ends
        self._input = data[at:]
        self.flush()

    # --- asking ---

    def ask(self, priority: int, intended: float) -> Asked:
        """One more request; `flush` sends it."""
        asked = Asked(self.count, priority, intended)
        first, second = self._prompts.of(self.count, priority)
        self.count += 1
        self._stream += 2
        self._open[self._stream] = asked
        block = self._requests if asked.number else self._first  # the first says that the table has no size
        head = frames.frame(frames.HEADERS, END_HEADERS, self._stream, block)
        self._send(head + data_frames(self._stream, first) + data_frames(self._stream, second), len(first) + len(second))
        return asked

    def answer(self, asked: Asked) -> None:
        """A replica has answered: the gateway is shown the head."""
        self.on_answer(asked)
        self._stream += 2
        message = _shown(asked.served, len(asked.booking), self._report).replace(
            _MARK[: len(asked.booking)].encode(), asked.booking.encode()
        )
        head = frames.frame(frames.HEADERS, END_HEADERS, self._stream, self._responses)
        self._send(head + data_frames(self._stream, message), len(message))

    def answer_due(self, now: float) -> None:
        """Answers what replicas have finished."""
        while self.held and self.held[0].due <= now:
            self.answer(self.held.popleft().asked)

    def flush(self) -> None:
        """Send what there is."""
        if self._output:
            self._transport.write(bytes(self._output))
            self._output.clear()

    @property
    def open(self) -> int:
        """Requests that nothing has become of yet."""
        return len(self._open)

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the peer has not read, as far as they are kept here."""
        return self._transport.get_write_buffer_size() + sum(map(len, self._kept))

    async def close(self) -> None:
        """Hangs up."""
        self._transport.abort()
        await self._done

    def _send(self, whole: bytes, size: int) -> None:
        if self._kept or self._window < size:
            self._kept.append(whole)
            return
        self._window -= size
        self._output += whole

    # --- what the gateway says ---

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == frames.DATA:
            self._credit(len(payload))
            asked = self._open.get(stream)
            if asked is not None and asked.outcome is None:
                self._read(asked, payload)
        elif kind == frames.RST_STREAM:
            self._settle(stream, RESET)
        elif kind == frames.WINDOW_UPDATE and not stream:
            self._window += frames.word("WINDOW_UPDATE", payload)
            self._send_kept()
        elif kind in (frames.SETTINGS, frames.PING) and not flags & frames.ACK:
            self._output += frames.frame(kind, frames.ACK, 0, payload if kind == frames.PING else b"")
        elif kind == frames.GOAWAY:
            raise RuntimeError(f"the gateway ends the connection: {payload[8:].decode(errors='replace')}")
        if flags & END_STREAM and kind in (frames.DATA, frames.HEADERS):
            self._output += frames.rst_stream(stream, Code.NO_ERROR)  # as Envoy: the gateway may end first
            self._settle(stream, ENDED)

    def _read(self, asked: Asked, payload: bytes) -> None:
        """The first message on a stream says what becomes of the request."""
        size = int.from_bytes(payload[1:5], "big")
        message = payload[5 : 5 + size]
        if len(message) < size:
            raise RuntimeError("the message that decides comes in parts")
        answer = ProcessingResponse.FromString(message)
        if answer.WhichOneof("response") == "immediate_response":
            given = {it.header.key: it.header.raw_value for it in answer.immediate_response.headers.set_headers}
            asked.outcome = given.get(headers.REASON, b"status %d" % answer.immediate_response.status.code).decode()
            return
        place, noted = PLACE.search(message), BOOKING.search(message)
        if place is None or noted is None:
            raise RuntimeError(f"an answer without a destination or a booking: {answer}")
        asked.outcome, asked.served, asked.booking = ANSWERED, place[1].decode(), noted[1].decode()

    def _settle(self, stream: int, otherwise: str) -> None:
        """A stream is over. `otherwise`: what has become of a request that had no answer."""
        asked = self._open.pop(stream, None)
        if asked is None:
            return
        if asked.outcome is None:
            asked.outcome = otherwise
        asked.settled = now = time.perf_counter()
        self.settled.append(asked)
        if asked.outcome == ANSWERED:
            if self.answer_after_s == 0:
                self.answer(asked)
            else:
                self.held.append(Held(now + self.answer_after_s if self.answer_after_s else float("inf"), asked))
        self.on_settled(asked)

    def _credit(self, size: int) -> None:
        self._unsaid += size
        if self._unsaid >= UPDATE_BYTES:
            self._output += frames.window_update(0, self._unsaid)
            self._unsaid = 0

    def _send_kept(self) -> None:
        while self._kept:
            # A request's size with its frames' heads is a little more than what it takes of the window.
            if self._window < len(self._kept[0]):
                return
            whole = self._kept.popleft()
            self._window -= len(whole)
            self._output += whole


@functools.cache
def _shown(served: str, length: int, report: str) -> bytes:
    """The message that shows a response's head, with a mark in place of a booking's name of this length."""
    return shown(served, _MARK[:length], report)


def outcomes(asked: list[Asked]) -> Counter[str]:
    """How many of each outcome."""
    return Counter("nothing yet" if it.outcome is None else it.outcome for it in asked)
