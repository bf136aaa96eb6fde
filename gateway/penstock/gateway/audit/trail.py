"""Puts together what becomes of each request: the decision, the response's head, the engine's word and Envoy's."""

import time
from collections.abc import Callable

from penstock.api.events import Event, RequestFinished
from penstock.gateway.audit.entry import MAX_ID, Entry, entry_of
from penstock.gateway.extproc.call import Call, Refused, Routed
from penstock.gateway.picker.bookings import Booking, State
from penstock.gateway.picker.candidates import ReplicaKey

LATE_S = 2.0
"""How long after its end more may become known of a request: engines tell every 50 ms, Envoy every 200 ms."""
SIBLINGS_S = 600.0
"""Seconds to wait for the other answers to one request if only the engine reports their ends."""


class _Open:
    """A request that is at a replica, or whose figures are not all known yet."""

    __slots__ = ("booking", "came", "entry", "finishes", "heard", "last", "over", "told_by_envoy", "waited_s")

    def __init__(self, entry: Entry, routed: Routed) -> None:
        self.entry = entry
        self.booking = routed.booking
        self.came = routed.came
        self.waited_s = max(routed.decided - routed.came, 0.0)
        self.finishes = routed.finishes
        self.told_by_envoy = routed.named is not None
        self.heard = False
        """True once the engine has reported the end of at least one answer."""
        self.over = not self.told_by_envoy
        """Envoy has done with it, or will never say so."""
        self.last = 0.0
        """When the newest was heard; monotonic seconds."""

    def complete(self, now: float) -> bool:
        """Whether no more will be known, or is waited for no longer."""
        if self.booking.state is not State.RELEASED:
            return False
        if self.heard and self.finishes <= 0 and self.over:
            return True
        siblings = self.heard and self.finishes > 0 and not (self.told_by_envoy and self.over)
        return now - self.last >= (SIBLINGS_S if siblings else LATE_S)


class Trail:
    """The requests that have no line yet, and the lines of those that do.

    Args:
        write: Takes a line.
        gateway: This process's name.
        name_of: A replica's name.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        write: Callable[[Entry], None],
        gateway: str,
        name_of: Callable[[ReplicaKey], str | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._gateway = gateway
        self._name_of = name_of
        self._clock = clock
        self._open: dict[Booking, _Open] = {}
        self._same: dict[str, list[_Open]] = {}
        """Requests by request id. Several may have the same id."""
        self._ended: dict[Booking, _Open] = {}
        """Requests whose end is known."""

    # --- what the gateway answers itself ---

    def answered(self, call: Call, status: int, reason: str | None, tenant: str | None = None, model: str | None = None) -> None:
        """The request went nowhere."""
        entry = self._entry(call)
        entry.status, entry.reason, entry.tenant, entry.model = status, reason, tenant or None, model
        self._write(entry)

    def refused(self, call: Call, refused: Refused) -> None:
        """The request was refused."""
        self.answered(call, refused.status, refused.reason, refused.tenant, refused.model)

    # --- what a replica answers ---

    def routed(self, call: Call, routed: Routed) -> None:
        """The request goes to a replica."""
        entry, prefill, choice = self._entry(call), routed.prefill_booking, routed.choice
        assert choice is not None
        entry.request_id = routed.booking.request_id[:MAX_ID]
        entry.tenant, entry.model, entry.adapter = routed.tenant or None, routed.model, routed.adapter
        entry.policy, entry.score = choice.policy, round(choice.scores[0], 6)
        if (next_best := choice.next_best) is not None:
            entry.next_best, entry.next_score = next_best[0], round(next_best[1], 6)
        entry.prompt_tokens, entry.predicted_cached_tokens = routed.prompt_tokens, choice.resident_tokens
        entry.prefill_replica_uid = None if prefill is None else prefill.key.uid
        its = _Open(entry, routed)
        entry.waited_ms = _ms(its.waited_s)
        self._place(its)
        self._open[routed.booking] = its
        self._same.setdefault(routed.booking.request_id, []).append(its)

    def responded(self, booking: Booking, status: str, *, streamed: bool) -> None:
        """The head of the response has come; of a stream that is the first token."""
        its = self._open.get(booking)
        if its is None:
            return
        its.entry.status = int(status) if status.isdecimal() else None
        if streamed and status.startswith("2"):
            its.entry.ttft_ms = _ms(self._clock() - its.came)

    def ended(self, booking: Booking, by: str) -> None:
        """The request counts no longer at its replica: see `Bookings.ended`."""
        its = self._open.get(booking)
        if its is not None:
            its.entry.ended_by = by
            self._place(its)
            self._ended[booking] = its
            self._news(its)

    def heard(self, key: ReplicaKey, event: Event) -> None:
        """A replica says what a request has cost: see `FleetFollower.listeners`."""
        if not isinstance(event, RequestFinished):
            return
        its = next((it for it in self._same.get(event.request_id, ()) if it.booking.key == key and it.finishes > 0), None)
        if its is None:
            return
        entry, first = its.entry, not its.heard
        its.heard = True
        its.finishes -= 1
        entry.prompt_tokens = event.prompt_tokens + (0 if first else entry.prompt_tokens or 0)
        entry.cached_tokens = event.cached_tokens + (entry.cached_tokens or 0)
        entry.output_tokens = event.output_tokens + (entry.output_tokens or 0)
        entry.finish_reason = event.reason
        if entry.ttft_ms is None and event.ttft_s > 0:
            entry.ttft_ms = _ms(its.waited_s + event.ttft_s)
        self._news(its)

    def over(self, booking: Booking, status: int, sent: int) -> None:
        """Envoy has done with the request."""
        its = self._open.get(booking)
        if its is not None:
            its.over = True
            its.entry.status = its.entry.status or status or None
            its.entry.bytes_sent = sent
            self._news(its)

    def sweep(self) -> None:
        """Writes what is complete."""
        now = self._clock()
        for its in [its for its in self._ended.values() if its.complete(now)]:
            self._done(its)

    def close(self) -> None:
        """Writes the rest with what is known: their ends belong to another process, or to none."""
        for its in list(self._open.values()):
            self._done(its)

    def _entry(self, call: Call) -> Entry:
        return entry_of(call, self._gateway, time.time())

    def _place(self, its: _Open) -> None:
        """Record the replica that answered. It can differ from the picked one."""
        its.entry.replica, its.entry.replica_uid = self._name_of(its.booking.key), its.booking.key.uid

    def _news(self, its: _Open) -> None:
        its.last = self._clock()
        its.entry.duration_ms = _ms(its.last - its.came)

    def _done(self, its: _Open) -> None:
        del self._open[its.booking]
        self._ended.pop(its.booking, None)
        same = self._same[its.booking.request_id]
        same.remove(its)
        if not same:
            del self._same[its.booking.request_id]
        self._write(its.entry)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
