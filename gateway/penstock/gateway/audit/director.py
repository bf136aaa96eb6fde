"""A `Director` that writes the audit log around another one."""

import asyncio
from collections.abc import Mapping

from penstock.api import headers
from penstock.gateway._pb.envoy.data.accesslog.v3.accesslog_pb2 import HTTPAccessLogEntry
from penstock.gateway.audit.trail import Trail
from penstock.gateway.audit.writer import AuditWriter
from penstock.gateway.extproc.call import Answered, Call, Refused, ResponseHead, Routed
from penstock.gateway.extproc.exchange import Director
from penstock.gateway.extproc.stages.identify import Identify
from penstock.gateway.extproc.underway import Underway
from penstock.gateway.load.follower import FleetFollower

SWEEP_S = 0.5


class AuditedDirector:
    """A director of whose requests each leaves a line in `trail`. The other arguments are those of `Audit`, and who decides."""

    def __init__(self, director: Director, trail: Trail, identify: Identify, underway: Underway) -> None:
        self._identify = identify
        self._director = director
        self._trail = trail
        self._underway = underway
        self.usual_heads = self.at_once = None  # each request and each response leaves a line
        self.preview = director.preview
        self.passed_on = director.passed_on
        self.ended = director.ended
        self.closed = director.closed

    async def route(self, call: Call) -> Routed | Answered:
        """Choose the destination of a complete request."""
        try:
            result = await self._director.route(call)
        except Refused:
            raise  # its exchange calls `refused`
        except asyncio.CancelledError:
            self._trail.answered(call, 499, "client_gone", self._tenant(call))
            raise
        except Exception:
            self._trail.answered(call, 500, "internal_error", self._tenant(call))
            raise
        if isinstance(result, Routed):
            self._trail.routed(call, result)
        else:
            self._trail.answered(call, result.status, result.reason, self._tenant(call))
        return result

    def responded(self, routed: Routed, head: ResponseHead) -> list[tuple[str, str]]:
        """Takes in the head of the response; returns headers to add to it."""
        self._responded(routed, head)
        return self._director.responded(routed, head)

    def returned(self, noted: Mapping[str, str], head: ResponseHead) -> list[tuple[str, str]]:
        """As `responded`, for an exchange that saw only the response."""
        routed = self._underway.get(noted[headers.BOOKING])
        if routed is not None:
            self._responded(routed, head)
        return self._director.returned(noted, head)

    def refused(self, call: Call, refused: Refused) -> None:
        """Record that the request was answered with an error, by the gateway or the director."""
        self._trail.refused(call, refused)
        self._director.refused(call, refused)

    def _tenant(self, call: Call) -> str | None:
        try:
            return self._identify.tenant(call).name
        except Refused:  # its key was withdrawn meanwhile
            return None

    def _responded(self, routed: Routed, head: ResponseHead) -> None:
        self._trail.responded(routed.booking, head.headers.get(":status", ""), streamed=head.streams)


class Audit:
    """The audit log of one gateway process.

    Args:
        writer: Takes the lines.
        name: This process's.
        follower: Whose events and bookings tell of ends.
        identify: Knows tenants.
        underway: The requests whose responses come on exchanges of their own.
    """

    def __init__(
        self,
        writer: AuditWriter,
        name: str,
        *,
        follower: FleetFollower,
        identify: Identify,
        underway: Underway,
    ) -> None:
        state = follower.state
        self._identify = identify
        self._writer = writer
        self._underway = underway
        self._trail = Trail(writer.write, name, lambda key: its.name if (its := state.directory.replicas.get(key)) else None)
        state.bookings.ended.append(self._trail.ended)
        follower.listeners.append(self._trail.heard)

    def director(self, director: Director) -> Director:
        """The same, with a line for each request."""
        return AuditedDirector(director, self._trail, self._identify, self._underway)

    def over(self, routed: Routed, entry: HTTPAccessLogEntry) -> None:
        """Envoy has done with a request."""
        self._trail.over(routed.booking, entry.response.response_code.value, entry.response.response_body_bytes)

    async def run(self) -> None:
        """Writes lines as they become complete, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self._trail.sweep()

    def start(self) -> None:
        """Begins to write."""
        self._writer.start()

    def close(self) -> None:
        """Writes all that is known."""
        self._trail.close()
        self._writer.close()
