"""The gateway's decision core over simulated replicas."""

import random
from pathlib import Path
from statistics import mean

import msgspec
import pytest

from penstock.gateway.picker.policies import POLICIES
from penstock.sim.driver import ORACLE, simulate
from penstock.sim.driver import run as drive
from penstock.sim.feed import TalkingReplica
from penstock.sim.outcome import Outcome, Slo
from penstock.sim.replica import ReplicaConfig
from penstock.sim.router import GatewayRouter
from penstock.sim.timing import StepTime
from penstock.sim.traces import Trace, TraceError, TraceRequest, load_azure, load_mooncake

BLOCK = 64
CONFIG = ReplicaConfig(kv_tokens=60_000)
SLO = Slo()


def synthetic(groups: int, count: int = 400, prefix: int = 60, rate: float = 20.0) -> Trace:
    """`count` prompts of which each begins with the prefix (in blocks) of one of `groups`; 0: nothing is shared."""
    rng, at, requests = random.Random(5), 0.0, []
    for number in range(count):
        at += rng.expovariate(rate)
        group = f"g{rng.randrange(groups)}" if groups else f"n{number}"
        shared = [f"{group}/{block}".encode() for block in range(prefix)]
        own = [f"{number}/{block}".encode() for block in range(2)]
        requests.append(TraceRequest(number, at, (prefix + 2) * BLOCK + 10, rng.randrange(1, 60), tuple(shared + own)))
    return Trace("synthetic", BLOCK, requests)


def run(trace: Trace, policy: str, seed: int = 0) -> Outcome:
    return simulate(trace, policy, 4, CONFIG, SLO, seed)


@pytest.mark.req("RT-15")
def test_with_shared_prefixes_cost_halves_the_first_token_and_without_it_costs_nothing() -> None:
    shared = synthetic(groups=40)
    assert run(shared, "Cost").ttft_p50 < run(shared, "LeastRequest").ttft_p50 / 2
    unshared = synthetic(groups=0, rate=8.0)
    assert run(unshared, "Cost").ttft_p50 < 1.05 * run(unshared, "LeastRequest").ttft_p50


@pytest.mark.req("RT-30")
def test_one_prompt_that_all_share_pins_nobody() -> None:
    outcome = run(synthetic(groups=1, rate=60.0), "Cost")
    assert outcome.balance < 1.35
    assert outcome.hit_rate > 0.9


@pytest.mark.req("RT-45")
@pytest.mark.parametrize("policy", [*POLICIES, ORACLE])
def test_every_policy_serves_the_whole_trace_and_repeats_itself(policy: str) -> None:
    trace = synthetic(groups=5, count=150)
    first = run(trace, policy)
    assert first.requests == 150
    assert first == run(trace, policy)
    assert first.hit_rate <= trace.infinite_cache_hits()


def test_with_long_answers_that_fill_the_caches_cost_finds_room_where_round_robin_waits() -> None:
    rng, requests, at = random.Random(9), [], 0.0
    for number in range(300):
        at += rng.expovariate(1.0)
        requests.append(TraceRequest(number, at, rng.choice((100, 1500)), rng.choice((50, 4000)), ()))
    trace = Trace("long", BLOCK, requests)
    config = msgspec.structs.replace(CONFIG, kv_tokens=20_000)
    seconds = {policy: simulate(trace, policy, 4, config, SLO).ttft_p99 for policy in ("Cost", "RoundRobin")}
    assert seconds["Cost"] < seconds["RoundRobin"] / 2


def test_traces_are_read_and_what_is_wrong_with_them_is_said(tmp_path: Path) -> None:
    mooncake = tmp_path / "m.jsonl"
    mooncake.write_text('{"timestamp": 1500, "input_length": 1100, "output_length": 0, "hash_ids": [7, 8, 9]}\n')
    (request,) = load_mooncake(mooncake).requests
    assert (request.at, request.prompt_tokens, request.output_tokens, len(request.blocks)) == (1.5, 1100, 1, 2)
    azure = tmp_path / "a.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.0000000,10,2\n"
    )
    first, second = load_azure(azure).requests
    assert (first.at, first.prompt_tokens, len(first.blocks)) == (0.0, 4808, 9)
    assert second.at == pytest.approx(1.02004)
    with pytest.raises(TraceError, match=r"nowhere\.jsonl: No such file"):
        load_mooncake(tmp_path / "nowhere.jsonl")
    mooncake.write_text("{}\n")
    with pytest.raises(TraceError, match=r"m\.jsonl, line 1: .*timestamp"):
        load_mooncake(mooncake)
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n")
    with pytest.raises(TraceError, match=r"a\.csv, row 1"):
        load_azure(azure)


def test_a_scaled_trace_keeps_its_order_and_its_gaps_in_proportion() -> None:
    trace = synthetic(groups=2, count=50)
    half = trace.scaled(trace.duration_s / 2)
    assert half.duration_s == pytest.approx(trace.duration_s / 2)
    assert [r.number for r in half.requests] == [r.number for r in trace.requests]


def test_a_replica_that_boasts_does_not_gather_a_queue() -> None:
    trace = synthetic(groups=0, count=800, rate=18.0)
    replicas = [TalkingReplica(CONFIG, BLOCK, boast=10.0 if number == 0 else 1.0) for number in range(4)]
    router = GatewayRouter(replicas, "Cost", BLOCK)
    drive(trace, replicas, router)
    learnt = [[r for r in replica.finished if r.request.number >= 400] for replica in replicas]
    boaster, *others = [mean(r.first_token - r.arrived for r in finished) for finished in learnt]
    assert boaster < 2 * max(others)
    assert router.correction(0) > 4
    assert all(router.correction(number) == 1 for number in (1, 2, 3))


def agents(count: int, seed: int) -> Trace:
    """Tasks that call again and again with a prefix of 60 to 240 blocks, and soon more of them than four replicas can serve."""
    rng, at, requests, tasks = random.Random(seed), 0.0, [], [("0", 120)]
    for number in range(count):
        at += rng.expovariate(16.0 if number < count // 3 else 64.0)
        if rng.random() < 0.1:
            tasks.append((str(number), rng.randrange(60, 240)))
        task, prefix = tasks[-1] if rng.random() < 0.7 else rng.choice(tasks)
        blocks = [f"t{task}/{block}".encode() for block in range(prefix)] + [f"{number}/{block}".encode() for block in range(4)]
        requests.append(TraceRequest(number, at, len(blocks) * BLOCK + 10, rng.randrange(10, 60), tuple(blocks)))
    return Trace("agents", BLOCK, requests)


@pytest.mark.slow
@pytest.mark.parametrize("speed", [1.0, 0.1])
def test_agents_in_a_rush_do_not_have_their_prefixes_computed_until_all_are_late(speed: float) -> None:
    """At any speed of the replicas: with all times stretched alike the same is right."""
    time = StepTime()
    slower = StepTime(**{name: value / speed for name, value in msgspec.structs.asdict(time).items()})
    config = msgspec.structs.replace(CONFIG, kv_tokens=200_000, time=slower)
    traces = [agents(400, seed) for seed in range(4)]
    stretched = [trace.scaled(trace.duration_s / speed) for trace in traces]
    late = {
        policy: mean(simulate(trace, policy, 4, config, SLO).ttft_p99 for trace in stretched)
        for policy in ("Cost", "WeightedScore")
    }
    assert late["Cost"] < 0.9 * late["WeightedScore"]
