"""What the head of a response says: who answered, how loaded it is, whether the request runs on."""

import logging
import time
from collections.abc import Callable, Mapping

from penstock.api import headers, load_report
from penstock.api.load_report import LoadReport, LoadReportError
from penstock.gateway.extproc.call import ResponseHead, Routed, printable
from penstock.gateway.extproc.underway import Underway
from penstock.gateway.flow.gate import FlowGate
from penstock.gateway.http.metrics import PickerMetrics
from penstock.gateway.load.foreign import from_orca
from penstock.gateway.load.own_reports import OwnReports, sane
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.compiled import Said, UsualHeads
from penstock.gateway.picker.state import FleetState

UNAVAILABLE = ("502", "503", "504")
"""What a proxy says in place of a replica that it cannot reach."""

log = logging.getLogger(__name__)


class Respond:
    """Keeps the booking of a routed request true."""

    def __init__(self, state: FleetState, gate: FlowGate, metrics: PickerMetrics) -> None:
        self._state = state
        self._gate = gate
        self._metrics = metrics
        self._own_reports = OwnReports(state.compiled)
        self._usual = state.usual_responses(self._own_reports.reader)

    def usual_heads(self, underway: Underway, clock: Callable[[], float]) -> UsualHeads | None:
        """What does `run` for those of the requests `underway` whose heads are usual; None: there is no such thing in Python.
        `clock`: monotonic seconds."""
        if self._usual is None or self._state.compiled is None:
            return None
        its = underway.routed, underway.unwatched, headers.BOOKING
        return self._state.compiled.Heads(self._usual, *its, clock, self._taken_in)

    def run(self, routed: Routed, head: ResponseHead) -> list[tuple[str, str]]:
        """Takes in the head of the response; returns headers to add to it."""
        if _informs(head.headers.get(":status", "")):
            return []
        key = self.take_in(routed, head, time.monotonic())
        added = [] if key is None else [(headers.REPLICA, key.uid)]
        added.append((headers.MODEL, printable(routed.name)))
        if routed.explanation is not None:
            added.append((headers.DECISION, routed.explanation))
        return added

    def take_in(self, routed: Routed, head: ResponseHead, now: float) -> ReplicaKey | None:
        """Takes in the head of the response; returns who has answered, as far as that is known."""
        if self._usual is not None:
            streamed = self._usual.take_in(routed, head.headers, head.served, now)
            if streamed is not None:
                self._taken_in(routed, head.headers[":status"], now, streamed)
                return routed.booking.key
        return self._uncommon(routed, head, now)

    def _taken_in(self, routed: Routed, status: str, now: float, streamed: bool) -> None:
        """The head of a usual response was taken in."""
        self._metrics.answered(routed.model, status, now - routed.came, streamed=streamed)
        self._gate.wake()

    def _uncommon(self, routed: Routed, head: ResponseHead, now: float) -> ReplicaKey | None:
        """As `take_in`, whatever has answered and however."""
        state, booking, status = self._state, routed.booking, head.headers.get(":status", "")
        if routed.prefill_booking is not None:  # what it computed has arrived
            state.bookings.release(routed.prefill_booking, "prefilled")
        asked = booking.key.rank
        served = self._served(head, asked)
        # Somebody else's words would be taken for the pick's.
        stranger = bool(head.served) and served is None
        if served is not None and served != booking.key:
            state.unreachable(booking.key, now)
            state.bookings.move(booking, served)
        key = served or booking.key  # a booking that has ended, since its replica is gone, stays where it was
        report = None if stranger or (asked is None and key.rank is not None) else self._report(key, head)
        good = status.startswith("2")
        streamed = good and head.streams
        if streamed:
            # Reports of others' engines have no number of their own: the next one asked for includes this request.
            ours = report is not None and self._state.ours(key)
            state.bookings.responded(booking, (report.epoch, report.seq) if report and ours else None, now)
        else:  # complete, or refused: nothing runs on
            state.bookings.release(booking, "answered" if good else "error_status")
        if report is not None:
            state.reported(key, report, now, in_header=True)
        if not stranger:
            self._judge(key, head, served is not None, now)
        self._metrics.answered(routed.model, status, now - routed.came if good else None, streamed=streamed)
        self._gate.wake()
        return None if stranger else key

    def strange(self, noted: Mapping[str, str], head: ResponseHead, *, counted: bool = False) -> list[tuple[str, str]]:
        """As `run`, for a request that is no longer known here, or that another gateway process picked for and described in
        `Routed.log`.
        `counted`: its end came before this head and was counted."""
        now, status = time.monotonic(), head.headers.get(":status", "")
        if _informs(status):
            return []
        if not counted:
            self._metrics.answered(noted.get("model", ""), status)
        key = self._served(head, None)
        if key is None:
            return []
        if (report := self._report(key, head)) is not None:
            self._state.reported(key, report, now, in_header=True)
        self._judge(key, head, True, now)
        self._gate.wake()
        return [(headers.REPLICA, key.uid), (headers.MODEL, noted.get(headers.NAME, ""))]

    def _report(self, key: ReplicaKey, head: ResponseHead) -> LoadReport | Said | None:
        """The load report on a response; None where there is none that can be read, or none of this data-parallel rank."""
        if key.rank is not None and _rank(head) != key.rank:
            return None
        packed = head.headers.get(headers.LOAD_BIN)
        value = head.headers.get(headers.LOAD) if packed is None else f"BIN {packed}"
        if value is None:
            return None
        try:
            if self._state.ours(key):
                return self._own_reports.read(value)
            heard = self._state.reports.get(key)
            report = from_orca(heard.report if heard else None, load_report.decode_metrics(value))
            return None if report is None else sane(report)
        except LoadReportError as error:
            log.info("unreadable load report of %s: %s", head.served, error)
            return None

    def _served(self, head: ResponseHead, asked: int | None) -> ReplicaKey | None:
        """Return the replica that answered. None if the gateway does not say, or names an unknown endpoint.

        Args:
            head: Of the response.
            asked: The data-parallel rank that the request named, where that is known.
        """
        rank = _rank(head)
        return self._state.directory.key_at(head.served.strip(), asked if rank is None else rank) if head.served else None

    def _judge(self, key: ReplicaKey, head: ResponseHead, reached: bool, now: float) -> None:
        """What the answer says of the replica's health."""
        status, state = head.headers.get(":status", ""), self._state
        if not status.startswith("5"):
            state.answered(key, now, error=False)
        elif headers.RETRIABLE in head.headers:
            state.refused(key, now)
        elif status in UNAVAILABLE and not reached:  # the proxy's own answer: there was none of the replica
            state.unreachable(key, now)
        else:
            state.answered(key, now, error=True)

    def ended(self, routed: Routed) -> None:
        """The last of the response has passed the gateway."""
        self._state.bookings.release(routed.booking, "stream")

    def closed(self, routed: Routed) -> None:
        """A stream that ends before the response headers was reset. Later the end of the stream is not the end of the request."""
        if routed.booking.unanswered:
            self._metrics.answered(routed.model, "reset")
        for booking in (routed.booking, routed.prefill_booking):
            if booking is not None and booking.unanswered:
                self._state.bookings.release(booking, "reset")
        self._gate.wake()

    def over(self, routed: Routed, status: int) -> None:
        """Envoy has done with the request. `status`: of the answer, also where its head was not shown; 0: there was none."""
        if routed.booking.unanswered:
            self._metrics.answered(routed.model, str(status) if status else "reset")
        for booking in (routed.booking, routed.prefill_booking):
            if booking is not None:
                self._state.bookings.release(booking, "access_log")
        self._gate.wake()


def _rank(head: ResponseHead) -> int | None:
    """The data-parallel rank that says to have answered."""
    value = head.headers.get(headers.DATA_PARALLEL_RANK, "")
    return int(value) if value.isascii() and value.isdigit() else None


def _informs(status: str) -> bool:
    """Whether it is no response yet: 100, 102 and 103 come before one."""
    return len(status) == 3 and status[0] == "1"
