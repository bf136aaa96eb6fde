"""vLLM's KV events, which SGLang's copy: as blocks under our own hashes, made of the tokens that the events carry.

Three frames as ours: topic, sequence number, msgpack `(ts, events, data_parallel_rank)`. Events are tagged structs, as arrays in
older versions and as maps in newer ones. Their block hashes are integers or bytes of a hash that a stranger cannot compute (it
may be seeded at random), so each is translated: a block's own hash follows from its parent's and its token ids.

A replay request is answered from a bounded buffer, without a snapshot: what it does not reach back to stays unknown.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import msgspec

from penstock.api import events
from penstock.api.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from penstock.gateway.load.event_wire import Batch, Replayed
from penstock.gateway.residency.index import MAX_BLOCKS_PER_REPLICA
from penstock.prompt.hashing import BlockHasher, ExtraKeys

_STORED = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
)
_REMOVED = ("block_hashes", "medium", "group_idx")
_NATIVE = dict[str, Any]
_LOOKS = 4
"""How many old names are examined for each new one, once there are too many."""
_Name = int | bytes
"""An engine's hash of a block."""


class _Removed(msgspec.Struct):
    """The types of what is read of an event; all else in it may be anything."""

    block_hashes: list[_Name]
    medium: str | None = None
    group_idx: int | None = None


class _Stored(_Removed, kw_only=True):
    token_ids: list[Any]
    block_size: Annotated[int, msgspec.Meta(gt=0, le=2**20)]
    parent_block_hash: _Name | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    cache_salt: str | None = None
    """SGLang's, which has no `extra_keys`."""
    kv_cache_spec_kind: str | None = None


class _Cleared(msgspec.Struct):
    """All blocks were cleared. Its fields are not read."""


_KNOWN: dict[str, type[msgspec.Struct]] = {"BlockStored": _Stored, "BlockRemoved": _Removed, "AllBlocksCleared": _Cleared}


class VllmWire:
    """See `EventWire`.

    Args:
        seed: Of the hash space in which prompts for such engines are hashed.
        held: Whether the residency index still knows this replica to cache a block.
        most: Names from which on those of blocks that the index has dropped are forgotten. The index drops by use, so the
            blocks that begin many prompts stay. Twice as many are never kept.
    """

    topic = b""
    has_epochs = False
    snapshot_from: int | None = None

    def __init__(self, seed: str, held: Callable[[bytes], bool] = lambda own: False, most: int = MAX_BLOCKS_PER_REPLICA) -> None:
        self._seed = seed
        self._held = held
        self._most = most
        self._hashers: dict[int, BlockHasher] = {}
        self._own: OrderedDict[Any, bytes] = OrderedDict()
        """The engine's hash of a block → ours."""
        self._other_groups: set[int] = set()
        """KV groups that hold no whole prefixes: sliding windows, state-space layers."""

    def replay_request(self, start: int) -> list[bytes]:
        """See `EventWire`: the engine expects what a REQ socket sends."""
        return [b"", events.encode_seq(start)]

    def replayed(self, frames: list[bytes]) -> Replayed | None:
        """What a message of the replay holds; None for its end."""
        if len(frames) not in (3, 4) or len(frames[-2]) != 8:  # newer versions put the topic before the number
            raise ValueError(f"{len(frames)} frames in place of 3 or 4")
        if frames[-2] == events.END_OF_REPLAY:
            return None
        return Replayed(events.decode_seq(frames[-2]), frames[-1])

    def decode(self, payload: bytes) -> Batch:
        """The batch of a message; raises `ValueError` on anything else."""
        raw = msgspec.msgpack.decode(payload)
        found = raw.get("events") if isinstance(raw, dict) else raw[1] if isinstance(raw, list) and len(raw) > 1 else None
        if not isinstance(found, list):
            raise ValueError("no batch of KV events")
        native = [_fields(event) for event in found]
        return Batch(0, (), native, bool(native) and native[0]["type"] == "AllBlocksCleared")

    def translate(self, event: object) -> Iterable[Event]:
        """What one of `Batch.blocks` says, which must come in order."""
        assert isinstance(event, dict)
        if event["type"] == "AllBlocksCleared":
            self.forget()
            return (AllBlocksCleared(),)
        if event.get("medium") not in (None, "GPU"):  # a copy in slower memory is neither stored nor removed here
            return ()
        if event["type"] == "BlockStored":
            return self._stored(event)
        if event["type"] == "BlockRemoved" and event.get("group_idx") not in self._other_groups:
            gone = [own for name in event["block_hashes"] if (own := self._own.pop(name, None)) is not None]
            return (BlockRemoved(gone),) if gone else ()
        return ()

    def forget(self) -> None:
        """What was translated so far is void."""
        self._own.clear()
        self._other_groups.clear()

    def _stored(self, event: _NATIVE) -> Iterable[Event]:
        kind, group = event.get("kv_cache_spec_kind"), event.get("group_idx")
        if group is not None and kind is not None and "full" not in kind and "mla" not in kind:
            self._other_groups.add(group)
        if group in self._other_groups:
            return ()
        names, tokens, size = event["block_hashes"], event["token_ids"], event["block_size"]
        parent = event.get("parent_block_hash")
        if parent is not None and parent not in self._own:  # an orphan: what it follows was lost
            return ()
        extra = _extra_keys(event, first=parent is None)
        if extra is None or not names or len(tokens) < len(names) * size or not all(_is_token(token) for token in tokens):
            return ()
        hasher = self._hashers.get(size) or self._hashers.setdefault(size, BlockHasher(size, self._seed))
        own = hasher.chain(None if parent is None else self._own[parent], tokens[: len(names) * size], extra, 0)
        self._own.update(zip(names, own, strict=True))
        self._forget_dropped(_LOOKS * len(own))
        return (BlockStored(own),)

    def _forget_dropped(self, looks: int) -> None:
        """Examines so many of the oldest names as long as there are too many: those of held blocks become the newest."""
        while looks > 0 and len(self._own) > self._most:
            name, own = self._own.popitem(last=False)
            if len(self._own) < 2 * self._most and self._held(own):
                self._own[name] = own
            looks -= 1


def _fields(event: Any) -> _NATIVE:
    """An event by its fields' names, whichever of the two forms it has; raises `ValueError` on anything else."""
    if isinstance(event, dict):
        fields: _NATIVE = event
    elif isinstance(event, list) and event:
        names = _STORED if event[0] == "BlockStored" else _REMOVED
        fields = {"type": event[0], **dict(zip(names, event[1:], strict=False))}
    else:
        raise ValueError("no KV event")
    kind = fields.get("type")
    known = _KNOWN.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise ValueError(f"no KV event: {kind!r}")
    msgspec.convert(fields, known)  # its errors are ValueErrors
    return fields


def _is_token(token: object) -> bool:
    return type(token) is int and 0 <= token < 2**32


def _extra_keys(event: _NATIVE, first: bool) -> ExtraKeys | None:
    """The adapter and the salt under which blocks were hashed; None where there is more than those, such as an image."""
    lora = event.get("lora_name")
    if lora is None and event.get("lora_id") is not None:
        return None  # an old engine, which does not say the name
    salt = event.get("cache_salt")
    each: Sequence[Any] = event.get("extra_keys") or ()
    for at, keys in enumerate(each):
        rest: Sequence[Any] = [key for key in keys or () if key != lora]
        if first and at == 0 and len(rest) == 1 and isinstance(rest[0], str):
            salt = rest[0]
        elif rest:
            return None
    return ExtraKeys(lora=lora, cache_salt=salt)
