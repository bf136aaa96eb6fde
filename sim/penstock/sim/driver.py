"""Runs a trace through a router and replicas in virtual time."""

import math
from collections.abc import Sequence

from penstock.sim.feed import TalkingReplica
from penstock.sim.outcome import Outcome, Slo, outcome
from penstock.sim.replica import ReplicaConfig
from penstock.sim.router import GatewayRouter, OracleRouter, Router
from penstock.sim.traces import Trace

ORACLE = "Oracle"


def run(trace: Trace, replicas: Sequence[TalkingReplica], router: Router) -> None:
    """Lets every request of `trace` arrive, and all of them end. Between two arrivals only the replicas act."""
    for request in trace.requests:
        for replica in replicas:
            replica.advance(request.at)
        router.learn(request.at)
        number = router.route(request, request.at)
        report = replicas[number].submit(request, request.at)
        router.sent(request, number, report, request.at)
    for replica in replicas:
        replica.advance(math.inf)


def simulate(trace: Trace, policy: str, count: int, config: ReplicaConfig, slo: Slo, seed: int = 0) -> Outcome:
    """One run of `trace` over `count` replicas under `policy`: one of the gateway's, or `ORACLE`."""
    replicas = [TalkingReplica(config, trace.block_size) for _ in range(count)]
    if policy == ORACLE:
        router: Router = OracleRouter(replicas)
    else:
        router = GatewayRouter(replicas, policy, trace.block_size, seed=seed)
    run(trace, replicas, router)
    preemptions = sum(replica.sim.preemptions for replica in replicas)
    time = config.time
    return outcome([replica.finished for replica in replicas], preemptions, slo, time.prefill_token_s, time.base_s / 32)
