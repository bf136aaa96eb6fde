"""Follows the fleet: keeps the state up to date and one event subscriber running for each replica."""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

import zmq.asyncio

from penstock.api.events import Event, RequestFinished, absurd
from penstock.api.fleet import Engine, Fleet, Replica
from penstock.api.load_report import LoadReport
from penstock.gateway.load.event_wire import EventWire, PenstockWire
from penstock.gateway.load.subscriber import EventSubscriber
from penstock.gateway.load.traits import FOREIGN_SEED
from penstock.gateway.load.vllm_events import VllmWire
from penstock.gateway.picker.candidates import ReplicaKey, key_of
from penstock.gateway.picker.state import FleetState

log = logging.getLogger(__name__)

AFRESH_S = 5.0
"""Seconds from the failure of a subscriber to the next one."""

_WIRES: dict[Engine, Callable[[Callable[[bytes], bool]], EventWire]] = {
    "penstock": lambda held: PenstockWire(),
    "vllm": lambda held: VllmWire(FOREIGN_SEED, held),
    "sglang": lambda held: VllmWire(FOREIGN_SEED, held),
}
"""By engine, what makes its wire of a function that says whether the residency index holds a block of the replica."""


class FleetFollower:
    """The replicas' events, and changes of the fleet, on their way into a `FleetState`."""

    def __init__(self, state: FleetState) -> None:
        self.state = state
        self.gaps = 0
        """Event messages lost and replayed."""
        self.synced = asyncio.Event()
        """Set once discovery knew the whole fleet."""
        self.listeners: list[Callable[[ReplicaKey, Event], None]] = []
        """Called with each event, after the state was updated."""
        self._context = zmq.asyncio.Context()
        self._tasks: dict[ReplicaKey, asyncio.Task[None]] = {}
        self._addresses: dict[ReplicaKey, tuple[str, int, int, Engine]] = {}
        self._changed = asyncio.Event()

    def update(self, fleet: Fleet) -> None:
        """Takes in what discovery sees now."""
        self.state.update(fleet)
        current = {key_of(replica): replica for replica in fleet.replicas}
        for key in [key for key in self._tasks if key not in current]:
            self._stop(key)
        for key, replica in current.items():
            self._subscribe(key, replica)
        self.synced.set()
        self.notify()

    def ports_changed(self) -> None:
        """An InferencePool is served on another port, or no more: those who wait at `/pools` are answered."""
        self.state.version += 1
        self.notify()

    def learned(self, key: ReplicaKey) -> None:
        """What `key` runs has become known."""
        replica = self.state.directory.replicas.get(key)
        if replica is not None:
            self._subscribe(key, replica)

    def _subscribe(self, key: ReplicaKey, replica: Replica) -> None:
        """Follows the events of a replica whose dialect is known, from another address if it has moved."""
        engine = self.state.engine(key)
        wire = _WIRES.get(engine)
        address = (replica.host, replica.events_port, replica.replay_port, engine)
        if wire is None or not replica.host or not replica.events_port or self._addresses.get(key) == address:
            return
        self._stop(key)
        self._addresses[key] = address
        made = partial(wire, partial(self.state.residency.holds, key))
        self._tasks[key] = asyncio.create_task(self._follow(key, replica, made), name=f"events {replica.title}")

    async def _follow(self, key: ReplicaKey, replica: Replica, wire: Callable[[], EventWire]) -> None:
        """One subscriber after another: what breaks one is forgotten with all that it knew."""
        while True:
            try:
                await EventSubscriber(self._context, replica, self, wire()).run()
            except Exception:
                log.exception("the events of %s broke what reads them; they are read anew in %g s", replica.title, AFRESH_S)
            self.lost(key)
            await asyncio.sleep(AFRESH_S)

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
        """See `EventSink`. What cannot be is nobody's load and on nobody's bill."""
        if isinstance(event, RequestFinished | LoadReport) and (why := absurd(event)) is not None:
            log.info("%s of %s is not believed: %s", type(event).__name__, key.uid, why)
            return
        self.state.event(key, event, time.monotonic())
        for listener in self.listeners:
            listener(key, event)

    def restarted(self, key: ReplicaKey) -> None:
        """A new process: everything that the old one said is void."""
        self.state.reports.drop(key)  # whatever the new process says next is newer
        self.state.restarted(key)

    def gap(self, key: ReplicaKey) -> None:
        """Messages were lost; a replay follows."""
        self.gaps += 1

    def lost(self, key: ReplicaKey) -> None:
        """Messages were lost that no replay brings back: what was known of its blocks is void."""
        self.state.events_lost(key)

    def complete(self, key: ReplicaKey) -> None:
        """A replay is complete: every block that the replica caches is known."""
        self.state.events_complete(key)
