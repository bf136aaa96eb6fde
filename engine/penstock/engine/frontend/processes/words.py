"""What a supervisor says to its frontends: messages on their standard input, whose end is the supervisor's end, and theirs."""

import msgspec

from penstock.engine import messages
from penstock.engine.core.ipc.framing import framed
from penstock.engine.frontend.processes.serve import ServeConfig


class FrontendStart(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The first word."""

    config: ServeConfig
    frontend: int
    """Number of the frontend, new for each process."""
    row: int
    """Row of the frontend, which its successor inherits."""
    core_addresses: list[str]
    """Of the cores by data-parallel rank."""
    counts: list[int]
    """Descriptors of the shared counts, by rank."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Finish what runs and end."""


class StopNow(msgspec.Struct, frozen=True, tag="now"):
    """End without waiting."""


class CoreGone(msgspec.Struct, frozen=True, tag="gone"):
    """A core has ended: fail what it ran, finish what the others run, and end."""

    rank: int
    reason: str


Word = FrontendStart | Stop | StopNow | CoreGone

_encoder = msgspec.msgpack.Encoder(enc_hook=messages.enc_hook)
_decoder = msgspec.msgpack.Decoder(Word, dec_hook=messages.dec_hook)


def encode(word: Word) -> bytes:
    """Return the message as it is written to a frontend's standard input."""
    return framed(_encoder.encode(word))


def decode(body: bytes) -> Word:
    """What follows the length."""
    return _decoder.decode(body)
