"""Replicas run what their users chose and may say anything: the policy has an answer to all of it, and the status has room."""

import math
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.api.load_report import LoadReport
from penstock.api.resources import PoolScalingStatus
from penstock.operator.autoscale.learned import extract
from penstock.operator.autoscale.limits import Goals, Limits, ModelLimits, Settings
from penstock.operator.autoscale.policy import Memory, Observation, PoolView, decide
from penstock.operator.autoscale.signals import PoolSignals, ReplicaSignal
from penstock.operator.observed import Observed, PoolObserved, ScalingStatus
from penstock.operator.status import status_of

# What `absurd` lets pass: from 0 to 2**53.
FIGURE = st.sampled_from([0.0, 5e-324, 1e-300, 1e-9, 0.5, 1.0, 100.0, 1e15, 2.0**53 - 1])
COUNT = st.sampled_from([0, 1, 8, 10**6, 2**53 - 1])
REPORT = st.builds(
    LoadReport,
    epoch=st.just(1),
    seq=st.just(1),
    num_requests_running=COUNT,
    num_requests_waiting=st.dictionaries(st.sampled_from(["capacity", "lora", "remote_kv"]), COUNT, max_size=2),
    max_num_seqs=COUNT,
    kv_cache_usage_perc=FIGURE,
    prefill_backlog_tokens=COUNT,
    prefill_tokens_per_s=FIGURE,
    decode_step_s=FIGURE,
    prompt_tokens_per_s=FIGURE,
    generation_tokens_per_s=FIGURE,
)
REPLICA = st.builds(ReplicaSignal, st.uuids().map(str), st.booleans(), st.booleans(), COUNT, st.none() | REPORT, st.just(0.5))
POOL = st.none() | st.builds(PoolSignals, COUNT, st.lists(REPLICA, max_size=3).map(tuple))
LOOKS = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 5.0, 1e6]), POOL, POOL), min_size=1, max_size=6)
GOALS = st.sampled_from([None, Goals(0.001, 0.001), Goals(None, 1.0)])
INT64 = 2**63


@settings(max_examples=150)
@given(looks=LOOKS, goals=GOALS)
def test_whatever_replicas_say_sizes_stay_within_their_bounds_and_the_status_can_be_written(looks: Any, goals: Any) -> None:
    cheap = Limits(min_replicas=1, max_replicas=4, goals=goals, down_window_s=0)
    limits = ModelLimits({"a": cheap, "b": replace(cheap, cost=1e6)}, budget=3e6)
    now, memory, sizes = 0.0, Memory(), {"a": 1, "b": 2}
    for after, first, second in looks:
        now += after
        views = {name: PoolView(sizes[name], (), load) for name, load in (("a", first), ("b", second))}
        decisions, memory = decide(Observation(now, 1.8e9, views), limits, Settings(), memory)
        sizes = {name: decision.replicas for name, decision in decisions.items()}
        for name, decision in decisions.items():
            assert 1 <= decision.replicas <= 4
            assert all(map(math.isfinite, decision.inputs.values()))
            report = ScalingStatus(
                1, decision.replicas, decision.constraint, decision.reason, learned=extract(memory.pools[name])
            )
            pool = PoolObserved(name, "r", 1, None, [], scaled=True, scaling=report)
            (written,) = status_of(Observed("m", 1, [pool]), [], "2026-01-01T00:00:00Z")["scaling"]
            PoolScalingStatus.model_validate(written)
            assert all(figure < INT64 for figure in written["learned"].values()), written
