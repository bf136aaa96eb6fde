"""Both forms of what reads and writes ext_proc's messages, which must agree."""

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from penstock.gateway.extproc.wire import Answer, CompiledWire, Message, Pick, PlainWire, Wire, as_bytes
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
