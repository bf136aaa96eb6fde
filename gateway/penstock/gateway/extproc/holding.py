"""Holds requests for models that exist and have no ready replica, bounded in count, bytes and time."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.api.fleet import Model
from penstock.gateway.extproc.call import Refused
from penstock.gateway.load.follower import FleetFollower

MAX_REQUESTS = 1_000
"""A model."""
MAX_BYTES = 64 * 1024 * 1024
"""A model."""
RETRY_AFTER_S = 5


class HoldingArea:
    """Waiting requests. A hold is shown to the autoscaler at once, through the version of `/pools`."""

    def __init__(self, follower: FleetFollower) -> None:
        self._follower = follower
        self._bytes: Counter[str] = Counter()
        self._closed = False

    @asynccontextmanager
    async def hold(self, model: Model, size: int) -> AsyncIterator[None]:
        """Shows a request of `size` bytes as held while the block runs; raises `Refused` with 503 where there is no room."""
        state = self._follower.state
        full = state.held.get(model.id, 0) >= MAX_REQUESTS or self._bytes[model.id] + size > MAX_BYTES
        if full or model.hold_timeout_s <= 0:
            raise no_ready_replica(model, "and enough requests wait already" if full else "")
        state.hold_began(model)
        self._bytes[model.id] += size
        self._follower.notify()
        try:
            yield
        finally:
            self._bytes[model.id] -= size
            state.hold_ended(model)

    async def changed(self, model: Model, until: float) -> None:
        """Waits for a change of the fleet; raises `Refused` with 503 at `until` (monotonic) and when the gateway stops."""
        if self._closed:
            raise Refused(503, "the gateway is shutting down; try again", "shutting_down", retry_after_s=1)
        try:
            async with asyncio.timeout(until - time.monotonic()):
                await self._follower.changed()
        except TimeoutError:
            raise no_ready_replica(model, f"and none became ready within {model.hold_timeout_s:g} s") from None

    def close(self) -> None:
        """Refuses all that is held."""
        self._closed = True
        self._follower.notify()


def no_ready_replica(model: Model, why: str) -> Refused:
    """The refusal of a request that nobody can take."""
    message = f"model {model.served_names[0]!r} has no ready replica {why}".rstrip() + "; try again later"
    return Refused(503, message, "no_ready_replica", retry_after_s=RETRY_AFTER_S)
