"""KV events as vLLM publishes them, for pickers of others that read those: llm-d's, AIBrix's, Dynamo's.

Three frames: topic, sequence number (8 bytes, big endian) and a msgpack array `[time, events, data_parallel_rank]`. Events are
maps with the key `type`, as in vLLM 0.32. A reader computes hashes of its own from the tokens; the hashes here are names.
"""

from typing import Any, Final

import msgspec

MEDIUM: Final = "GPU"
"""vLLM's word for the KV cache itself, on any device."""


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag="BlockStored"):
    """Full blocks of one sequence, one after another, became reusable."""

    block_hashes: list[int]
    """The last 64 bits of each block's hash."""
    parent_block_hash: int | None
    """Of the block before the first of these; None: they begin a sequence."""
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    """By block, what forks the chain besides its tokens: the adapter's name, `[identifier, offset]` of each image, the salt."""


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="BlockRemoved"):
    """Blocks were evicted."""

    block_hashes: list[int]
    medium: str | None = MEDIUM


class AllBlocksCleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    """The whole prefix cache was reset."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """All events of one moment."""

    ts: float
    """Unix time in seconds."""
    events: list[Event]
    data_parallel_rank: int


_encoder = msgspec.msgpack.Encoder()


def encode(batch: EventBatch) -> bytes:
    """The payload of one message."""
    return _encoder.encode(batch)


def name_of(block_hash: bytes) -> int:
    """A block's hash as these events have it."""
    return int.from_bytes(block_hash[-8:], "big")
