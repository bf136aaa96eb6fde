"""How a replica's events travel: topic, replay and payload, for engines that differ in them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from penstock.api import events
from penstock.api.events import AllBlocksCleared, Event, LoadReport, RequestFinished

_FUTURE = 2**63
"""Larger than any sequence number."""


class Replayed(NamedTuple):
    """One message of a replay."""

    seq: int
    payload: bytes


class Batch(NamedTuple):
    """The events of one message, in the engine's own words."""

    epoch: int
    at_once: Sequence[Event]
    """Events that do not depend on any order."""
    blocks: Sequence[object]
    """Events that do; see `EventWire.translate`."""
    snapshot: bool
    """The batch begins with emptying the cache: nothing from before it is needed."""


class EventWire(Protocol):
    """One replica's dialect. `translate` may remember what it has seen; the rest does not."""

    topic: bytes
    """The topic to subscribe to."""
    has_epochs: bool
    """Batches name the process that they come from; else a sequence number that falls back says that it is a new one."""
    snapshot_from: int | None
    """Asking for events from this number on is answered by all that is cached; None where an engine cannot tell."""

    def replay_request(self, start: int) -> list[bytes]:
        """The frames that ask for everything from number `start` on."""
        ...

    def replayed(self, frames: list[bytes]) -> Replayed | None:
        """What a message of the replay holds; None for its end. Raises `ValueError` on anything else."""
        ...

    def decode(self, payload: bytes) -> Batch:
        """The batch of a message; raises `ValueError` on anything else."""
        ...

    def translate(self, event: object) -> Iterable[Event]:
        """What one of `Batch.blocks` says, which must come in order."""
        ...

    def forget(self) -> None:
        """What was translated so far is void."""
        ...


class PenstockWire:
    """The event stream of Penstock engines, as `penstock.api.events` defines it."""

    topic = events.TOPIC
    has_epochs = True
    snapshot_from: int | None = _FUTURE

    def replay_request(self, start: int) -> list[bytes]:
        """The frames that ask for everything from number `start` on."""
        return [events.encode_seq(start)]

    def replayed(self, frames: list[bytes]) -> Replayed | None:
        """What a message of the replay holds; None for its end."""
        if frames[0] == events.END_OF_REPLAY:
            return None
        if len(frames) != 2:
            raise ValueError(f"{len(frames)} frames in place of 2")
        return Replayed(events.decode_seq(frames[0]), frames[1])

    def decode(self, payload: bytes) -> Batch:
        """The batch of a message; raises `ValueError` on anything else."""
        batch = events.decode(payload)  # msgspec's errors are ValueErrors
        at_once = [event for event in batch.events if isinstance(event, LoadReport | RequestFinished)]
        blocks = [event for event in batch.events if not isinstance(event, LoadReport | RequestFinished)]
        return Batch(batch.epoch, at_once, blocks, bool(blocks) and isinstance(blocks[0], AllBlocksCleared))

    def translate(self, event: object) -> Iterable[Event]:
        """They are ours."""
        assert isinstance(event, Event)
        return (event,)

    def forget(self) -> None:
        """Keep no state."""
