"""The event stream of a replica: msgpack over ZMQ PUB with sequence numbers, and a ROUTER socket for replay.

A message on the PUB socket is `[TOPIC, seq (8 bytes, big endian), payload]`, the payload being one `EventBatch`. Sequence
numbers of an epoch start at 0 and have no gaps, so that a subscriber that sees one knows that it has missed something.

The replay socket takes `[start_seq (8 bytes)]` from a DEALER and answers `[seq, payload]` messages in order up to the newest,
then `[END_OF_REPLAY, b""]`. Where the buffer no longer reaches back to `start_seq`, or `start_seq` lies in the future (the
subscriber knew another epoch), the first answer is a *snapshot*: a batch that begins with `AllBlocksCleared` and stores every
block that is cached now, under the sequence number of the last event that it includes. Replay is therefore always complete.

A block may also lie in a tier behind the KV cache: `medium` says so, and each medium is stored and removed for itself. A replica
that has a tier says so with an empty `BlockStored` of its medium, before any other block event.
"""

from typing import Final, Literal, get_args

import msgspec

from penstock.api.load_report import LoadReport

TOPIC: Final = b"penstock"
END_OF_REPLAY: Final = b"\xff" * 8


Medium = Literal["memory", "disk", "store", "object"]
"""A tier behind the KV cache: the host's memory, its disk, a store that replicas share, an object store. The nearest comes
first."""
MEDIA: Final[tuple[Medium, ...]] = get_args(Medium)


class BlockStored(msgspec.Struct, frozen=True, tag="BlockStored", omit_defaults=True):
    """Full blocks became reusable. Hashes are those of `penstock.prompt.hashing`: a block's hash holds its whole prefix."""

    block_hashes: list[bytes]
    medium: Medium | None = None
    """None: they are in the KV cache."""


class BlockRemoved(msgspec.Struct, frozen=True, tag="BlockRemoved", omit_defaults=True):
    """Blocks were evicted, from this medium alone."""

    block_hashes: list[bytes]
    medium: Medium | None = None
    """None: from the KV cache."""


class AllBlocksCleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    """The whole prefix cache was reset, in every medium."""


class RequestFinished(msgspec.Struct, frozen=True, tag="RequestFinished"):
    """A request has left the engine, whatever the reason; `request_id` is the `x-request-id` that it came with."""

    request_id: str
    reason: str
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that the prefix cache supplied."""
    output_tokens: int
    ttft_s: float = 0.0
    """Seconds from the request's arrival at the engine to its first token. 0 if there was no first token or it was not
    measured."""


Event = BlockStored | BlockRemoved | AllBlocksCleared | RequestFinished | LoadReport


class EventBatch(msgspec.Struct, frozen=True):
    """All events of one engine step, or of one moment between steps."""

    epoch: int
    """Start of the engine, milliseconds since the Unix epoch; the same number as in its load reports."""
    time: float
    """Unix time in seconds."""
    events: list[Event]


BEYOND: Final = 2.0**53
"""Figures from here on are none: a float counts no further by ones."""
_FIGURES: Final = {
    kind: tuple(field.name for field in msgspec.structs.fields(kind) if field.type in (int, float))
    for kind in (LoadReport, RequestFinished)
}


def absurd(said: LoadReport | RequestFinished) -> str | None:
    """The first figure that no replica can have: below 0, beyond all bounds or no number; None where there is none."""
    for name in _FIGURES[type(said)]:
        if not 0 <= getattr(said, name) < BEYOND:
            return f"{name} is {getattr(said, name)}"
    if isinstance(said, LoadReport):
        for counts in (said.num_requests_waiting, said.lora_running, said.lora_waiting):
            for name, count in counts.items():
                if not 0 <= count < BEYOND:
                    return f"{name!r} is {count}"
    return None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EventBatch)


def encode(batch: EventBatch) -> bytes:
    """The payload of one message."""
    return _encoder.encode(batch)


def decode(payload: bytes) -> EventBatch:
    """The batch of a payload; raises `msgspec.MsgspecError` on anything else."""
    return _decoder.decode(payload)


def encode_seq(seq: int) -> bytes:
    """A sequence number as it stands in a message frame."""
    return seq.to_bytes(8, "big")


def decode_seq(frame: bytes) -> int:
    """The sequence number in a message frame."""
    return int.from_bytes(frame, "big")
