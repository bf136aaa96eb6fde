"""Requests that our own Envoy has sent to a replica, by names that come back to us: with the response, and with the end."""

import itertools
import secrets
from collections import OrderedDict

from penstock.gateway.extproc.call import Routed
from penstock.gateway.load.reports import ReportStore
from penstock.gateway.picker.bookings import Booking, Bookings, State

RESPONSE_S = 300.0
"""Least seconds that an unobserved request without a response counts if Envoy never reports its end. Answers that are not
streamed may take as long as Envoy's timeout, so only the report of an idle replica shows that it has forgotten the request. For a
replica that does not report for so long nothing else would end it, and lost requests would fill it."""
COUNTED_KEPT = 4096
"""Requests whose heads may still come after their ends."""


class Underway:
    """The routed requests of one gateway process whose ends have not been told. Time is an argument (monotonic seconds).

    Args:
        bookings: Theirs.
        reports: What replicas say that they have to do.
    """

    def __init__(self, bookings: Bookings, reports: ReportStore) -> None:
        self._bookings = bookings
        self._reports = reports
        self._process = secrets.token_hex(4)
        self._numbers = itertools.count()
        self.routed: dict[str, Routed] = {}
        """The requests by name, for those who only look."""
        self.unwatched: set[str] = set()
        """Requests whose exchange with the picker is over, and whose response had not been seen at the last sweep."""
        self._done: set[str] = set()
        """Requests whose bookings were released before the last sweep."""
        self._counted: OrderedDict[str, None] = OrderedDict()
        """The last of those that had ended before the heads of their responses came."""

    def __len__(self) -> int:
        return len(self.routed)

    def name(self) -> str:
        """A name for one more request, which no other process gives."""
        return f"{self._process}-{next(self._numbers):x}"

    def ours(self, name: str) -> bool:
        """Whether this process gave the name."""
        return name.startswith(f"{self._process}-")

    def add(self, name: str, routed: Routed) -> None:
        """The request goes on to its replica."""
        self.routed[name] = routed

    def get(self, name: str) -> Routed | None:
        """The request of that name; None where it has ended, or is another process's."""
        return self.routed.get(name)

    def responded(self, name: str) -> Routed | None:
        """The head of its response has come; returns what `get` does."""
        self.unwatched.discard(name)
        return self.routed.get(name)

    def unanswered(self, name: str) -> bool:
        """Return whether the request's exchange is over and no head of a response has come."""
        return name in self.unwatched

    def passed_on(self, routed: Routed) -> None:
        """Record that no exchange observes the request until its response comes."""
        assert routed.named is not None
        self.unwatched.add(routed.named)

    def ended(self, name: str) -> Routed | None:
        """Envoy has done with the request, whatever became of it; returns what `get` would have."""
        routed = self.routed.pop(name, None)
        if name in self.unwatched:
            self.unwatched.remove(name)
            if routed is not None and routed.booking.unanswered:
                self._counted[name] = None
                if len(self._counted) > COUNTED_KEPT:
                    self._counted.popitem(last=False)
        return routed

    def counted(self, name: str) -> bool:
        """Whether it had ended before the head of its response has come, as it does now; its end was counted for an answer."""
        return self._counted.pop(name, self) is None

    def sweep(self, now: float) -> None:
        """End the bookings of old requests that have no response and that their replicas do not know. Those of the other old ones
        no longer add to what their replicas report: a replica that is never idle reports the requests that it has, and a lost
        one would add to that for an hour. Forget requests that only lack Envoy's entry, if their bookings were released before
        the last sweep."""
        for name in list(self.unwatched):
            routed = self.routed.get(name)
            if routed is None or not routed.booking.unanswered:
                self.unwatched.discard(name)
            elif now >= routed.booking.made_at + RESPONSE_S:
                self._grown_old(routed, now)
        for name in self._done:
            self.routed.pop(name, None)
        self._done = {name for name, routed in self.routed.items() if routed.booking.state is State.RELEASED}

    def _grown_old(self, routed: Routed, now: float) -> None:
        for booking in filter(None, (routed.booking, routed.prefill_booking)):
            if self._forgotten(routed.booking, now):
                self._bookings.release(booking, "expired")
            elif self._reports.heard_after(booking.key, booking.made_at + RESPONSE_S):
                self._bookings.included(booking)

    def _forgotten(self, booking: Booking, now: float) -> bool:
        """Whether the replica knows nothing of a request that is as old as `RESPONSE_S`, or tells nothing of what it knows."""
        key, due = booking.key, booking.made_at + RESPONSE_S
        return self._reports.idle(key, due) or bool(self._reports.silent([key], now, RESPONSE_S))
