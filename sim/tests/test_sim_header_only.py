"""Balancing on the load reports that ride on responses alone: nobody is asked, and no stream is read."""

import random
from statistics import mean

import msgspec
import pytest

from penstock.api.events import RequestFinished
from penstock.api.load_report import LoadReport
from penstock.sim.driver import run
from penstock.sim.feed import TalkingReplica
from penstock.sim.replica import ReplicaConfig
from penstock.sim.router import GatewayRouter
from penstock.sim.traces import Trace, TraceRequest

pytestmark = pytest.mark.slow

BLOCK, REPLICAS = 64, 4


class HeaderOnly(GatewayRouter):
    """Hears of a replica when it answers, and of a request's end by Envoy's access log."""

    def learn(self, now: float) -> None:
        """No report comes but on responses."""
        for key, replica in zip(self._keys, self._replicas, strict=True):
            for said in replica.stream:
                if isinstance(said.event, RequestFinished):
                    self.state.bookings.finished(key, said.event.request_id)
            replica.stream.clear()


class Endless(GatewayRouter):
    """Hears of a replica when it answers, and of no request's end."""

    def learn(self, now: float) -> None:
        """Nobody says anything but on responses."""
        for replica in self._replicas:
            replica.stream.clear()


class Deaf(HeaderOnly):
    """Takes in no report at all."""

    def sent(self, request: TraceRequest, replica: int, report: LoadReport, now: float) -> None:
        """It is not looked at."""


def trace(seed: int) -> Trace:
    """Short prompts, answers of some hundred tokens."""
    rng, at, requests = random.Random(seed), 0.0, list[TraceRequest]()
    for number in range(900):
        at += rng.expovariate(30.0)
        blocks = (f"{number}".encode(), f"{number}/1".encode())
        requests.append(TraceRequest(number, at, 2 * BLOCK, rng.randrange(50, 250), blocks))
    return Trace("mixed", BLOCK, requests)


def imbalance(kind: type[GatewayRouter], seed: int, policy: str = "LeastRequest", *, stranger_too: bool = True) -> float:
    """Requests that run at the busiest replica, over the mean's. One replica may also serve somebody who does not ask us."""
    replicas = [TalkingReplica(ReplicaConfig(), BLOCK) for _ in range(REPLICAS)]
    seen: list[float] = []

    class Watched(kind):  # type: ignore[misc, valid-type]
        def route(self, request: TraceRequest, now: float) -> int:
            if stranger_too and request.number % 8 == 0:
                stranger = msgspec.structs.replace(request, number=-1 - request.number, blocks=(b"a", b"b"))
                replicas[0].submit(stranger, now)
            running = [replica.sim.rows + len(replica.sim.waiting) for replica in replicas]
            if request.number > 200:
                seen.append(max(running) / mean(running))
            return super().route(request, now)

    run(trace(seed), replicas, Watched(replicas, policy, BLOCK, seed=seed))
    return mean(seen)


@pytest.mark.req("RT-44")
def test_reports_on_responses_balance_as_well_as_those_that_are_asked_for() -> None:
    scraped, headers, deaf = ([imbalance(kind, seed) for seed in range(3)] for kind in (GatewayRouter, HeaderOnly, Deaf))
    assert mean(headers) < 1.1 * mean(scraped)
    assert mean(deaf) > 1.1 * mean(scraped), "without them it would not"


@pytest.mark.req("RT-44")
@pytest.mark.parametrize("kind", [HeaderOnly, Endless])
def test_the_cost_pins_nobody_to_the_replica_that_has_spoken_last(kind: type[GatewayRouter]) -> None:
    scraped, headers = (
        mean(imbalance(each, seed, "Cost", stranger_too=False) for seed in range(2)) for each in (GatewayRouter, kind)
    )
    assert headers < 1.2 * scraped, f"of {REPLICAS} where one gets everything"
