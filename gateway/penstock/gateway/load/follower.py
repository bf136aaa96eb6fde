"""Follows the fleet: keeps the state up to date and one event subscriber running for each replica."""

import asyncio
import logging
import time

import zmq.asyncio

from penstock.api.events import Event
from penstock.api.fleet import Fleet
from penstock.gateway.load.subscriber import EventSubscriber
from penstock.gateway.picker.candidates import ReplicaKey, key_of
from penstock.gateway.picker.state import FleetState

log = logging.getLogger(__name__)


class FleetFollower:
    """The replicas' events, and changes of the fleet, on their way into a `FleetState`."""

    def __init__(self, state: FleetState) -> None:
        self.state = state
        self.gaps = 0
        """Event messages lost and replayed."""
        self.synced = asyncio.Event()
        """Set once discovery knew the whole fleet."""
        self._context = zmq.asyncio.Context()
        self._tasks: dict[ReplicaKey, asyncio.Task[None]] = {}
        self._addresses: dict[ReplicaKey, tuple[str, int, int]] = {}
        self._changed = asyncio.Event()

    def update(self, fleet: Fleet) -> None:
        """Takes in what discovery sees now."""
        self.state.update(fleet)
        current = {key_of(replica): replica for replica in fleet.replicas}
        for key in [key for key in self._tasks if key not in current]:
            self._stop(key)
        for key, replica in current.items():
            address = (replica.host, replica.events_port, replica.replay_port)
            if replica.host and self._addresses.get(key) != address:
                self._stop(key)
                self._addresses[key] = address
                task = asyncio.create_task(EventSubscriber(self._context, replica, self).run(), name=f"events {replica.name}")
                task.add_done_callback(_report_failure)
                self._tasks[key] = task
        self.synced.set()
        self.notify()

    def notify(self) -> None:
        """Wakes all that wait for a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def changed(self) -> None:
        """Waits for the next change of the fleet or of what is held."""
        await self._changed.wait()

    async def close(self) -> None:
        """Stops all subscribers."""
        tasks = list(self._tasks.values())
        for key in list(self._tasks):
            self._stop(key)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    def _stop(self, key: ReplicaKey) -> None:
        self._addresses.pop(key, None)
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    # --- EventSink ---

    def event(self, key: ReplicaKey, event: Event) -> None:
        """See `EventSink`."""
        self.state.event(key, event, time.monotonic())

    def restarted(self, key: ReplicaKey) -> None:
        """See `EventSink`."""
        self.state.restarted(key)

    def gap(self, key: ReplicaKey) -> None:
        """See `EventSink`."""
        self.gaps += 1


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s ended: residency of that replica is no longer followed", task.get_name(), exc_info=error)
