"""What replicas without events must have cached: the prompts that were sent to them.

The blocks of each prompt go into the same index as those of events, so its users need no distinction. An engine evicts what was
used least recently, and so does the index. Its size is the engine's own number of blocks, if that is known. When an answer
reports cached tokens, the size is corrected: down if fewer were cached than predicted, up if more.
"""

from collections.abc import Sequence

from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.residency.index import Knowledge, ResidencyIndex

ROOM = 31_250
"""Blocks, where an engine has not said: half a million tokens in blocks of 16."""
SHRINK, GROW = 0.95, 1.05
"""Factors on the size after a prediction of too many and of too few cached tokens."""
LEAST = 64
SLACK = 2
"""Blocks by which a prediction may be wrong without being so: what is being evicted or computed at the moment."""
IDLE_S = 1800.0
"""After this long without one of our requests, the cache is assumed to hold other clients' prompts."""


class RoutingHistory:
    """Predicted residency of the replicas that send no events. Time is an argument (monotonic seconds)."""

    def __init__(self, index: ResidencyIndex) -> None:
        self._index = index
        self._room: dict[ReplicaKey, float] = {}
        self._most: dict[ReplicaKey, int] = {}
        self._used_at: dict[ReplicaKey, float] = {}

    def room(self, key: ReplicaKey) -> int:
        """How many blocks `key` is believed to keep."""
        return round(self._room.get(key, ROOM))

    def set_blocks(self, key: ReplicaKey, num_blocks: int) -> None:
        """Set the number of blocks that `key` reports."""
        if num_blocks and self._most.get(key) != num_blocks:
            self._most[key] = num_blocks
            self._room[key] = num_blocks
            self._index.set_limit(key, num_blocks)

    def routed(self, key: ReplicaKey, prompts: Sequence[Sequence[bytes]], now: float) -> None:
        """A request with these prompts' blocks goes to `key`."""
        if key not in self._room:
            self._room[key] = ROOM
            self._index.set_limit(key, ROOM)
        self._index.set_knowledge(key, Knowledge.PREDICTED)
        self._used_at[key] = now
        for hashes in prompts:
            self._index.store(key, hashes)

    def confirmed(self, key: ReplicaKey, predicted: int, cached: int) -> None:
        """The engine at `key` found `cached` blocks of a prompt, where `predicted` were expected."""
        if key not in self._room or not max(predicted, cached):
            return
        if cached < predicted - SLACK:
            # What is believed to be there is more than fits: the room is less than what the index holds.
            room = min(self._room[key], float(self._index.blocks(key))) * SHRINK
        elif cached > predicted + SLACK:
            room = self._room[key] * GROW
        else:
            return
        self._room[key] = min(max(room, LEAST), float(self._most.get(key, 2 * ROOM)))
        self._index.set_limit(key, round(self._room[key]))

    def drop(self, key: ReplicaKey) -> None:
        """`key` is gone."""
        for known in (self._room, self._most, self._used_at):
            known.pop(key, None)

    def expire(self, now: float) -> None:
        """Forgets what replicas held that have had no request for long."""
        for key in [key for key, at in self._used_at.items() if now - at >= IDLE_S]:
            del self._used_at[key]
            self._index.clear(key)
