"""A pool whose size a scaler decides, in virtual time: replicas start, serve, drain and go."""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from penstock.sim.feed import TalkingReplica
from penstock.sim.outcome import Slo
from penstock.sim.replica import ReplicaConfig
from penstock.sim.traces import Trace, TraceRequest


@dataclass(eq=False)
class Member:
    """A replica of the pool."""

    name: str
    replica: TalkingReplica
    created: float
    ready_at: float
    drained_at: float = math.inf
    """When it was told to finish what it has and go."""

    @property
    def draining(self) -> bool:
        """Whether it was."""
        return self.drained_at < math.inf

    @property
    def requests(self) -> int:
        """Running and waiting."""
        return self.replica.sim.rows + len(self.replica.sim.waiting)


@dataclass(frozen=True)
class Look:
    """What a scaler sees."""

    now: float
    size: int
    """Replicas asked for."""
    ready: Sequence[Member]
    starting: Sequence[Member]
    held: int
    """Requests that wait for a first replica."""


class Scaler(Protocol):
    """Decides a size."""

    period_s: float

    def size(self, look: Look) -> int:
        """The size that the pool should have now."""
        ...


class Scaled(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to."""

    requests: int
    attained: float
    """Share of requests within the SLO."""
    ttft_p95: float
    replica_hours: float
    """Each replica from its creation to its end, cold start and drain included."""
    changes: int
    """Times that the size was changed."""
    most: int


class ElasticPool:
    """The pool. A request goes to the ready replica that computes its prompt soonest; where none is ready it waits.

    Args:
        scaler: Decides the size; asked at each of its periods.
        config: Of a replica.
        block_size: Of the trace.
        cold_start_s: From a replica's creation until it is ready.
        first: Replicas that are ready at the beginning.
    """

    def __init__(self, scaler: Scaler, config: ReplicaConfig, block_size: int, cold_start_s: float, first: int) -> None:
        self._scaler, self._config, self._block_size, self._cold_start_s = scaler, config, block_size, cold_start_s
        self.members: list[Member] = []
        self.gone: list[Member] = []
        self.held: deque[TraceRequest] = deque()
        self.changes, self.most, self.replica_s, self.size = 0, first, 0.0, first
        self._number = 0
        for _ in range(first):
            self._start(-cold_start_s)

    def _start(self, now: float) -> None:
        self._number += 1
        replica = TalkingReplica(self._config, self._block_size)
        self.members.append(Member(f"r{self._number}", replica, max(now, 0.0), now + self._cold_start_s))

    def submit(self, request: TraceRequest) -> None:
        """A request arrives."""
        self.advance(request.at)
        self.held.append(request)
        self._route(request.at)

    def _route(self, now: float) -> None:
        ready = [member for member in self.members if member.ready_at <= now and not member.draining]
        while self.held and ready:
            request = self.held.popleft()
            best = min(ready, key=lambda member: self._seconds(member, request))
            best.replica.submit(request, now)

    def _seconds(self, member: Member, request: TraceRequest) -> float:
        sim, time = member.replica.sim, self._config.time
        todo = sim.backlog + request.prompt_tokens - sim.pool.depth(request.blocks) * self._block_size
        return todo * time.prefill_token_s + sim.rows * time.base_s

    def advance(self, until: float) -> None:
        """Lets the replicas work until then; those that drain and have nothing left go."""
        for member in list(self.members):
            member.replica.advance(until)
            member.replica.stream.clear()
            if member.draining and not member.requests:
                self.members.remove(member)
                self.gone.append(member)
                self.replica_s += max(member.replica.sim.now, member.drained_at) - member.created

    def look(self, now: float) -> None:
        """The scaler looks, and what it says is done: starting replicas are given up first, then those with the fewest
        requests."""
        self.advance(now)
        self._route(now)
        live = [member for member in self.members if not member.draining]
        ready = [member for member in live if member.ready_at <= now]
        starting = [member for member in live if member.ready_at > now]
        wanted = self._scaler.size(Look(now, self.size, ready, starting, len(self.held)))
        self.changes += wanted != self.size
        self.size, self.most = wanted, max(self.most, wanted)
        for _ in range(wanted - len(live)):
            self._start(now)
        for member in sorted(live, key=lambda it: (it.ready_at <= now, it.requests, -it.created))[: max(len(live) - wanted, 0)]:
            member.drained_at = now
            if member.ready_at > now:
                self.members.remove(member)
                self.replica_s += now - member.created

    def finish(self, now: float) -> None:
        """End the trace. Requests that still run end and are not counted."""
        self.replica_s += sum(now - member.created for member in self.members)
        self.advance(math.inf)


def run(trace: Trace, scaler: Scaler, config: ReplicaConfig, slo: Slo, *, cold_start_s: float, first: int) -> Scaled:
    """One run of a trace."""
    pool = ElasticPool(scaler, config, trace.block_size, cold_start_s, first)
    ticks = [scaler.period_s]
    for request in trace.requests:
        while ticks[0] <= request.at:
            now = heapq.heappop(ticks)
            pool.look(now)
            heapq.heappush(ticks, now + scaler.period_s)
        pool.submit(request)
    end = trace.requests[-1].at
    pool.look(end + cold_start_s)  # nobody stays held
    pool.finish(end)
    finished = [running for member in (*pool.members, *pool.gone) for running in member.replica.finished]
    ttfts = sorted(running.first_token - running.request.at for running in finished)
    good = sum(
        running.first_token - running.request.at <= slo.ttft_s
        and (running.finished - running.first_token) / max(running.request.output_tokens - 1, 1) <= slo.itl_s
        for running in finished
    )
    return Scaled(
        requests=len(finished),
        attained=good / len(trace.requests),
        ttft_p95=ttfts[int(0.95 * (len(ttfts) - 1))],
        replica_hours=pool.replica_s / 3600,
        changes=pool.changes,
        most=pool.most,
    )
