"""Room at replicas, what a simulated pool makes of it, and the forecast."""

import heapq
import math
import random
from collections import Counter
from typing import Any

import pytest

from penstock.api.load_report import LoadReport
from penstock.gateway.flow.capacity import NEW_ROOM, NEW_S, QUEUE_SHARE, SILENT_ROOM, Standing, room, room_at
from penstock.gateway.flow.control import FlowControl, FlowLimits
from penstock.gateway.flow.forecast import LONGEST_S, START_S, Forecast
from penstock.gateway.flow.ticket import Ticket
from penstock.gateway.picker.candidates import Booked

ALL = 10**9
"""Places that are never there: every replica counts."""


def standing(
    *, age: float = 0.0, booked: int = 0, prefill: int = 0, unanswered: int = 0, known: float = 99.0, **load: Any
) -> Standing:
    report = LoadReport(epoch=1, seq=1, **load) if load else None
    return Standing(report=report, report_age_s=age, booked=Booked(booked, prefill), unanswered=unanswered, known_s=known)


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (standing(max_num_seqs=32), 36),
        (standing(max_num_seqs=32, num_requests_running=30, booked=4), 2),
        (standing(max_num_seqs=32, num_requests_running=32, num_requests_waiting={"capacity": 3}), 1),
        (standing(max_num_seqs=32, num_requests_running=32, booked=9), -5),
        (standing(max_num_seqs=32, num_requests_running=3, num_requests_waiting={"capacity": 1}), 3),  # KV, not rows
        (standing(max_num_seqs=32, num_requests_running=3, kv_cache_usage_perc=0.97, booked=4), 0),
        (standing(max_num_seqs=32, num_requests_running=1, prefill_backlog_tokens=2100, prefill_tokens_per_s=2000.0), 0),
        (standing(max_num_seqs=32, booked=1, prefill=2100, prefill_tokens_per_s=2000.0), 0),
        (standing(max_num_seqs=32, num_requests_running=1, prefill_backlog_tokens=3, prefill_tokens_per_s=2.0), 0),
        (standing(max_num_seqs=32, num_requests_running=1, prefill_backlog_tokens=2000, prefill_tokens_per_s=2000.0), 35),
        (standing(max_num_seqs=32, num_requests_running=1, prefill_backlog_tokens=2100), 35),  # at no known speed
        (standing(max_num_seqs=1, num_requests_running=1), 1),
        (standing(num_requests_running=1), 287),  # an engine that does not say
        (standing(known=1.0), NEW_ROOM),
        (standing(known=1.0, unanswered=NEW_ROOM), 0),
        (standing(known=NEW_S), SILENT_ROOM),
        (standing(max_num_seqs=4, num_requests_running=4, booked=9, age=60.0), SILENT_ROOM),  # stale is not full
    ],
)
def test_room_at_a_replica(there: Standing, expected: int) -> None:
    assert room_at(there) == expected
    assert room([there, there], ALL) == 2 * max(expected, 0)


def test_room_is_counted_no_further_than_is_enough() -> None:
    full, free = standing(max_num_seqs=32, num_requests_running=32, booked=9), standing(max_num_seqs=32)
    replicas = iter([full, free, free, free, free])
    assert room(replicas, 40) == 72
    assert len(list(replicas)) == 2


class Pool:
    """Replicas with rows, in virtual time: prefill and decode take as long as the tokens of a request."""

    def __init__(self, replicas: int, rows: int, report_s: float) -> None:
        self.rows, self.report_s = rows, report_s
        self.running: list[list[float]] = [[] for _ in range(replicas)]
        self.queued: list[list[Ticket]] = [[] for _ in range(replicas)]
        self.reported = [LoadReport(epoch=1, seq=0, max_num_seqs=rows) for _ in range(replicas)]
        self.since = [0] * replicas
        self.done: Counter[str] = Counter()

    def send(self, at: int, ticket: Ticket, now: float) -> None:
        self.queued[at].append(ticket)
        self.since[at] += 1
        self.step(at, now)

    def step(self, at: int, now: float) -> None:
        while self.running[at] and self.running[at][0] <= now:
            heapq.heappop(self.running[at])
        while self.queued[at] and len(self.running[at]) < self.rows:
            ticket = self.queued[at].pop(0)
            heapq.heappush(self.running[at], now + ticket.tokens / 100)
            self.done[ticket.tenant] += ticket.tokens

    def report(self, at: int) -> None:
        waiting = {"capacity": len(self.queued[at])} if self.queued[at] else {}
        self.reported[at] = LoadReport(
            epoch=1,
            seq=1,
            max_num_seqs=self.rows,
            num_requests_running=len(self.running[at]),
            num_requests_waiting=waiting,  # type: ignore[arg-type]
        )
        self.since[at] = 0

    def standings(self) -> list[Standing]:
        return [
            Standing(report=r, report_age_s=0.0, booked=Booked(n, 0), unanswered=n, known_s=9.0)
            for r, n in zip(self.reported, self.since, strict=True)
        ]


@pytest.mark.parametrize(("replicas", "rows", "report_s"), [(1, 2, 0.05), (1, 16, 0.1), (3, 8, 0.05), (4, 16, 0.1), (2, 5, 0.1)])
def test_dispatch_keeps_engines_busy_and_their_queues_short(replicas: int, rows: int, report_s: float) -> None:
    """Work conserving: while requests wait at the gateway, rows stand empty for no longer than a report takes to come, and never
    with the engine's own queue beyond its share. Two tenants of weights 1 and 3 get shares by weight."""
    pool, control = Pool(replicas, rows, report_s), FlowControl(FlowLimits(requests=10_000, tenant_requests=10_000))
    chance = random.Random(replicas * rows)
    ordinal, now, next_report = 0, 0.0, 0.0
    idle_steps = steps = 0
    queue_limit = max(rows // QUEUE_SHARE, 1)
    while now < 8.0:
        for tenant, weight in (("one", 1.0), ("three", 3.0)):
            while control.requests_of(tenant) < 100:
                ordinal += 1
                tokens = chance.randint(20, 60)
                control.offer(Ticket(model="m", tenant=tenant, weight=weight, tokens=tokens, until=1e9, ordinal=ordinal))
        for at in range(replicas):
            pool.step(at, now)
        if now >= next_report:
            for at in range(replicas):
                pool.report(at)
            next_report = now + report_s
        for _ in range(room(pool.standings(), ALL)):
            best = min(range(replicas), key=lambda at: len(pool.running[at]) + len(pool.queued[at]))
            ticket = control.take("m")
            assert ticket is not None
            pool.send(best, ticket, now)
        assert all(len(queue) <= queue_limit + 1 for queue in pool.queued)
        steps += replicas * rows
        idle_steps += sum(rows - len(running) for running in pool.running)
        now += 0.02
    assert idle_steps / steps < 0.25
    assert pool.done["three"] / pool.done["one"] == pytest.approx(3.0, rel=0.1)
    shares = [pool.done["one"], pool.done["three"] / 3]
    assert sum(shares) ** 2 / (2 * sum(x * x for x in shares)) > 0.99  # Jain's index


def test_retry_after_is_the_tokens_ahead_at_the_pace_that_was_measured() -> None:
    forecast = Forecast(0.0)
    for tenth in range(600):  # 1,000 tokens a second
        forecast.pace.add(100, tenth / 10, pressed=True)
    assert forecast.pace.rate(60.0) == pytest.approx(1000, rel=0.02)
    assert forecast.retry_after_s(20_000, 60.0) == pytest.approx(20, abs=1)
    assert forecast.retry_after_s(0, 60.0) == 1
    assert forecast.retry_after_s(10**9, 60.0) == LONGEST_S
    # What little went on since, while nobody waited, says nothing about what the replicas can do.
    forecast.pace.add(100, 100.0, pressed=False)
    assert forecast.retry_after_s(20_000, 100.0) == pytest.approx(20, abs=1)


def test_the_pace_of_the_first_seconds_is_not_underestimated() -> None:
    forecast = Forecast(5.0)
    for tenth in range(20):
        forecast.pace.add(100, 5.0 + tenth / 10, pressed=True)
    assert forecast.pace.rate(7.0) == pytest.approx(1000, rel=0.1)


def test_retry_after_a_start_is_what_is_left_of_it_as_the_last_one_took() -> None:
    forecast = Forecast(0.0)
    forecast.starting(0.0)
    assert forecast.retry_after_s(0, 10.0) == math.ceil(START_S - 10)
    assert forecast.retry_after_s(0, 100.0) == 50
    forecast.ready(12.0)
    assert forecast.retry_after_s(0, 12.0) == 1
    forecast.starting(50.0)
    assert forecast.retry_after_s(0, 52.0) == 10
    forecast.abandoned()
    assert forecast.retry_after_s(0, 52.0) == 1
