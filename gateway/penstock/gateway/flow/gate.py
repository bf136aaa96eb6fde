"""The asynchronous shell around flow control: it has the clock, the futures and the view of the fleet.

Without pressure a request passes on a credit: a count of free places that is computed again every few milliseconds at most. Then
there is no queue.
"""

import asyncio
import time
from collections.abc import Iterator
from typing import Literal

from penstock.api.events import Event, RequestFinished
from penstock.api.fleet import Adapter, Model, Replica
from penstock.api.load_report import LoadReport
from penstock.gateway.flow.capacity import Standing, room
from penstock.gateway.flow.control import FlowControl, FlowLimits, Shed, ShedReason
from penstock.gateway.flow.forecast import Forecast
from penstock.gateway.flow.ticket import Ticket, queue_name
from penstock.gateway.load.follower import FleetFollower
from penstock.gateway.picker.bookings import State
from penstock.gateway.picker.candidates import ReplicaKey, key_of

CREDIT_S = 0.05
"""How long free places that were counted are believed."""
PLENTY = 256
"""Free places that are enough for that long: of a fleet with room only a few replicas are looked at."""
TICK_S = 0.1
"""Seconds between checks, while requests wait, for changes without an event, such as a report that became stale."""

Reason = ShedReason | Literal["displaced", "no_ready_replica", "adapter_not_loaded", "saturated", "shutting_down"]


class TurnedAway(Exception):
    """A request that does not go on; `retry_after_s`: whole seconds after which it may."""

    def __init__(self, reason: Reason, retry_after_s: int) -> None:
        super().__init__(reason)
        self.reason: Reason = reason
        self.retry_after_s = retry_after_s


class FleetMoved(Exception):
    """The models have changed while a request waited, or its adapter has come: what its name means has to be asked again."""


class _Lane:
    """One model, as the gate sees it, or what waits for one of its adapters: for any replica to have it, not for room."""

    __slots__ = ("adapter", "credits", "forecast", "good_until", "model", "replicas", "seen", "transit", "waking")

    def __init__(self, model: Model, now: float, adapter: str | None = None) -> None:
        self.model = model
        self.adapter = adapter
        self.credits = 0
        self.good_until = now
        self.transit = 0
        """Requests that have gone on and are not booked yet."""
        self.waking = 0
        """Of these, the ones that have waited and have not heard of it yet: who comes meanwhile is behind them."""
        self.forecast = Forecast(now)
        self.replicas: list[Replica] = []
        """The replicas that `seen` was made of."""
        self.seen: dict[ReplicaKey, float] = {}
        """When each ready replica was seen first."""


class FlowGate:
    """Lets requests go on when the replicas of their model can take them."""

    def __init__(self, follower: FleetFollower, limits: FlowLimits) -> None:
        self.control = FlowControl(limits)
        self._follower = follower
        self._state = follower.state
        self._lanes: dict[str, _Lane] = {}
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}
        self._models: list[Model] = []
        self._adapters: list[Adapter] = []
        self._scheduled = False
        self._closed = False
        follower.listeners.append(self._heard)

    # --- the way of one request ---

    def enter(self, model: Model, tokens: int, now: float, adapter: str | None = None) -> bool:
        """Whether a request of about `tokens` goes on at once; then `leave` must follow. `adapter`: which it names."""
        if (adapter is not None and self._state.slates.lacks(model, adapter)) or not self.has_room(model, now):
            return False
        self._gone_on(self._lanes[model.id], tokens, now).transit += 1
        return True

    def has_room(self, model: Model, now: float) -> bool:
        """Whether a request for the model itself would go on at once."""
        lane = self._lanes.get(model.id)
        if lane is None:
            lane = self._lanes[model.id] = _Lane(model, now)
        if lane.waking or (self.control.requests and model.id in self.control.queues):
            return False
        if lane.credits <= 0 or now >= lane.good_until:
            lane.model = model
            lane.credits, lane.good_until = self._room(lane, now) - lane.transit, now + CREDIT_S
        return lane.credits > 0

    def passed(self, model: Model, tokens: int, now: float) -> None:
        """Do what `enter` and `leave` do together, for a request that had room and is booked by now."""
        self._gone_on(self._lanes[model.id], tokens, now)
        self._pump_soon()

    @staticmethod
    def _gone_on(lane: _Lane, tokens: int, now: float) -> _Lane:
        lane.credits -= 1
        lane.forecast.pace.add(tokens, now, pressed=False)
        return lane

    def queue(self, model: Model, adapter: str | None) -> str:
        """Return the queue of a request that does not pass at once."""
        return queue_name(model.id, adapter if self._state.slates.lacks(model, adapter) else None)

    async def wait(self, ticket: Ticket, model: Model, tenant_requests: int | None = None, adapter: str | None = None) -> None:
        """Waits until a request may go on; then `leave` must follow.

        Args:
            ticket: Its place in the queue.
            model: Its model.
            tenant_requests: How many may wait of its tenant; None for what all may.
            adapter: Which it names.

        Raises:
            TurnedAway: there is no room, or it took too long.
            FleetMoved: ask what the model's name means, and come again. What waits for an adapter never goes on otherwise.
        """
        now = time.monotonic()
        if self._closed:
            raise TurnedAway("shutting_down", 1)
        lane = self._lanes.get(ticket.model)
        if lane is None:
            lane = self._lanes[ticket.model] = _Lane(model, now, None if ticket.model == model.id else adapter)
        lane.model = model
        if ticket.until <= now:
            raise self._late(lane, ticket)
        self._offer(lane, ticket, tenant_requests)
        future = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        self._announce(model)
        self._pump_soon()
        try:
            async with asyncio.timeout(ticket.until - now):
                await future
        except BaseException as error:
            if self._waiting.pop(ticket, None) is not None:
                self.control.leave(ticket)
            elif future.done() and not future.cancelled() and future.exception() is None:
                self.leave(model)  # it went on in the moment in which it gave up
            if isinstance(error, TimeoutError):
                raise self._late(lane, ticket) from None
            raise
        finally:
            if future.done() and not future.cancelled() and future.exception() is None:
                lane.waking -= 1
            self._state.hold_ended(model)
            if ticket.model not in self.control.queues:
                lane.forecast.abandoned()

    def leave(self, model: Model, *, in_vain: bool = False) -> None:
        """Release the hold of a request that passed and was booked or given up. `in_vain`: no replica could be picked, so the
        count of places was wrong."""
        lane = self._lanes.get(model.id)
        if lane is not None:
            lane.transit -= 1
            if in_vain:
                lane.good_until = 0.0
        self._pump_soon()

    def anybody(self, model: Model) -> bool:
        """Whether the model has a replica that may be picked at all."""
        return next(self._ready(model), None) is not None

    def _retry_after_s(self, lane: _Lane, ticket: Ticket) -> int:
        """When a request like this one would probably go on."""
        queue = self.control.queues.get(ticket.model)
        return lane.forecast.retry_after_s(queue.tokens_before(ticket.priority) if queue else 0, time.monotonic())

    # --- what moves the queues ---

    async def run(self) -> None:
        """Looks after what waits, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(TICK_S):
                    await self._follower.changed()
            except TimeoutError:
                pass
            fleet = self._state.directory.fleet
            if (fleet.models, fleet.adapters) != (self._models, self._adapters):
                self._models, self._adapters = fleet.models, fleet.adapters
                self._send_all(FleetMoved())
                known = {model.id for model in fleet.models}
                self._lanes = {ident: lane for ident, lane in self._lanes.items() if ident in known or lane.transit}
            self._pump()

    def wake(self) -> None:
        """Check the queues: capacity may have become free."""
        if self.control.requests:
            self._pump_soon()

    def close(self) -> None:
        """Turns away all that waits, and whatever would."""
        self._closed = True
        self._send_all(TurnedAway("shutting_down", 1))

    def _heard(self, key: ReplicaKey, event: Event) -> None:
        if self.control.requests and isinstance(event, LoadReport | RequestFinished):
            self._pump_soon()

    def _pump_soon(self) -> None:
        if self.control.requests and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Lets as many go on as there is room for."""
        self._scheduled = False
        now = time.monotonic()
        for ident in list(self.control.queues):
            lane = self._lanes[ident]
            if lane.adapter is not None:
                self._call(ident, lane, now)
                continue
            free = self._room(lane, now) - lane.transit
            if lane.seen:
                lane.forecast.ready(now)
            else:
                lane.forecast.starting(now)
            while free > 0 and (ticket := self.control.take(ident)) is not None:
                future = self._waiting.pop(ticket)
                if future.done():  # its client has left in this very turn of the loop
                    continue
                future.set_result(None)
                lane.waking += 1
                lane.forecast.pace.add(ticket.tokens, now, pressed=True)
                lane.transit += 1
                free -= 1
            lane.credits, lane.good_until = free, now + CREDIT_S

    def _call(self, ident: str, lane: _Lane, now: float) -> None:
        """Once a replica has the adapter, those that wait for it come again, and may have to wait for room."""
        if self._state.slates.lacks(lane.model, lane.adapter):
            lane.forecast.starting(now)
            return
        lane.forecast.ready(now)
        while (ticket := self.control.take(ident)) is not None:
            self._send(ticket, FleetMoved())

    def _offer(self, lane: _Lane, ticket: Ticket, tenant_requests: int | None) -> None:
        try:
            displaced = self.control.offer(ticket, tenant_requests)
        except Shed as shed:
            raise TurnedAway(shed.reason, self._retry_after_s(lane, ticket)) from None
        for other in displaced:
            self._send(other, TurnedAway("displaced", self._retry_after_s(self._lanes[other.model], other)))

    def _announce(self, model: Model) -> None:
        """Shows the autoscaler what is held: at once for the first, then each time that it has doubled."""
        self._state.hold_began(model)
        held = self._state.held[model.id]
        if held & (held - 1) == 0:
            self._follower.notify()

    def _late(self, lane: _Lane, ticket: Ticket) -> TurnedAway:
        reason: Reason = "no_ready_replica"
        if self.anybody(lane.model):
            reason = "saturated" if lane.adapter is None else "adapter_not_loaded"
        return TurnedAway(reason, self._retry_after_s(lane, ticket))

    def _send_all(self, error: Exception) -> None:
        for ticket in list(self._waiting):
            self.control.leave(ticket)
            self._send(ticket, error)

    def _send(self, ticket: Ticket, error: Exception) -> None:
        """Ends the waiting of one that has no place in the queue any more."""
        future = self._waiting.pop(ticket)
        if not future.done():
            future.set_exception(error)

    # --- what the fleet can take ---

    def _ready(self, model: Model) -> Iterator[Replica]:
        return (r for r in self._state.directory.replicas_of(model) if r.ready and not r.terminating and not r.cordoned)

    def _room(self, lane: _Lane, now: float) -> int:
        replicas = self._state.directory.replicas_of(lane.model)
        if replicas is not lane.replicas:  # the fleet has changed
            lane.replicas = replicas
            lane.seen = {key: lane.seen.get(key, now) for key in map(key_of, self._ready(lane.model))}
        return room((self._standing(key, now, now - seen) for key, seen in lane.seen.items()), lane.transit + PLENTY)

    def _standing(self, key: ReplicaKey, now: float, known_s: float) -> Standing:
        heard, bookings = self._state.reports.get(key), self._state.bookings
        return Standing(
            report=heard.report if heard else None,
            report_age_s=now - heard.at if heard else 0.0,
            booked=bookings.outstanding(key),
            unanswered=bookings.count(key, State.PENDING),
            known_s=known_s,
        )
