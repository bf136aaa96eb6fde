"""How many more requests a model's replicas can take now, so that they queue at the gateway, where they are shared out fairly,
and not in the engines. Pure.

An engine keeps a short queue of its own: an eighth of its rows, so that a row that frees is filled before anybody here hears of
it. Nothing that is unknown counts as full: where reports are missing or old, the requests on their way without an answer bound
what is sent, and those end.
"""

from collections.abc import Iterable

import msgspec

from penstock.api.load_report import LoadReport
from penstock.gateway.picker.candidates import Booked

FRESH_S = 5.0
"""A replica that answers is heard about once a second."""
NEW_S = 5.0
"""Seconds for which a replica without any report counts as new."""
NEW_ROOM = 8
"""Requests that one may have unanswered: enough to begin, too few for everything that was held to rush there."""
SILENT_ROOM = 256
"""Requests that one may have unanswered that does not report."""
UNSTATED_ROWS = 256
"""Rows of an engine that does not say how many it has."""
QUEUE_SHARE = 8
"""An engine may queue one request for this many of its rows."""
QUEUE_S = 1.0
"""Seconds of prefill that may queue there."""
KV_FULL = 0.95


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """One ready replica at one moment."""

    report: LoadReport | None
    report_age_s: float
    booked: Booked
    """What was sent there since the report."""
    unanswered: int
    """Requests sent there whose response headers have not come."""
    known_s: float
    """How long it has been there."""


def room(standings: Iterable[Standing], enough: int) -> int:
    """How many more requests the replicas can take together; where that is more than `enough`, how many the first of them can
    that are enough. One that has too many takes nothing from the others' room."""
    places = 0
    for standing in standings:
        places += max(room_at(standing), 0)
        if places >= enough:
            break
    return places


def room_at(standing: Standing) -> int:
    """How many more requests one replica can take; not above 0 where it has enough."""
    report, booked = standing.report, standing.booked
    if report is None or standing.report_age_s > FRESH_S:
        most = NEW_ROOM if report is None and standing.known_s < NEW_S else SILENT_ROOM
        return most - standing.unanswered
    rows = report.max_num_seqs or UNSTATED_ROWS
    queue = max(rows // QUEUE_SHARE, 1)
    waiting = report.waiting + booked.requests
    there = report.num_requests_running + waiting
    if not there:
        return rows + queue
    if _prefill_s(standing, report) > QUEUE_S:
        return 0
    if report.num_requests_waiting.get("capacity") or report.kv_cache_usage_perc >= KV_FULL:
        return queue - waiting
    return rows + queue - there


def _prefill_s(standing: Standing, report: LoadReport) -> float:
    """Seconds of prefill that is there already; 0 where its speed is not known."""
    if not report.prefill_tokens_per_s:
        return 0.0
    return (report.prefill_backlog_tokens + standing.booked.prefill_tokens) / report.prefill_tokens_per_s
