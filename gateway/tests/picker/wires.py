"""Both forms of what reads and writes ext_proc's messages, which must agree, and what a server has written."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from penstock.gateway.extproc.wire import Answer, CompiledWire, Message, Pick, PlainWire, Wire, as_bytes
from penstock.gateway.h2 import frames
from penstock.gateway.picker.compiled import installed


class BothWires:
    """Python's form, and the compiled one where it is installed."""

    def __init__(self) -> None:
        compiled = installed()
        self._plain = PlainWire()
        self._others: list[Wire] = [] if compiled is None else [CompiledWire(compiled)]

    def read(self, data: bytes) -> Message:
        """The message, in which all agree; raises `DecodeError` where all do."""
        try:
            message = self._plain.read(data)
        except DecodeError:
            for wire in self._others:
                try:
                    read = wire.read(data)
                except DecodeError:
                    continue
                raise AssertionError(f"{data!r} is read as {read}") from None
            raise
        for wire in self._others:
            assert wire.read(data) == message
        return message

    def picked(self, pick: Pick) -> bytes:
        """The answer, in which all agree."""
        return self._agreed([wire.picked(pick) for wire in (self._plain, *self._others)])

    def chunk(self, body: bytes, ends: bool) -> bytes:
        """The answer, in which all agree."""
        return self._agreed([wire.chunk(body, ends) for wire in (self._plain, *self._others)])

    @staticmethod
    def _agreed(answers: list[bytes]) -> bytes:
        first, *others = answers
        for other in others:
            assert ProcessingResponse.FromString(other) == ProcessingResponse.FromString(first)
        return first


def read(message: ProcessingRequest) -> Message:
    """What the message says."""
    return BothWires().read(message.SerializeToString())


def parsed(answers: Sequence[Answer]) -> list[ProcessingResponse]:
    """The answers as protobuf's classes have them."""
    return [ProcessingResponse.FromString(as_bytes(answer)) for answer in answers]


class Sink(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self._closing = b"", False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def pause_reading(self) -> None:
        """Reads are made by hand, one a turn of the loop."""

    resume_reading = pause_reading

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    abort = close


class Frame(NamedTuple):
    """A frame of HTTP/2."""

    kind: int
    flags: int
    stream: int
    payload: bytes
    whole: bytes


def framed(written: bytes) -> Iterator[Frame]:
    """The frames that were written, all of them whole."""
    at = 0
    while at < len(written):
        high, low, kind, flags, stream = frames.HEAD.unpack_from(written, at)
        begin = at + frames.HEAD_BYTES
        end = begin + (high << 8 | low)
        yield Frame(kind, flags, stream, written[begin:end], written[at:end])
        at = end


def by_stream(written: bytes) -> dict[int, bytes]:
    """What was written, by stream."""
    found = defaultdict[int, bytes](bytes)
    for frame in framed(written):
        found[frame.stream] += frame.whole
    return found
