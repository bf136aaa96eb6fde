"""The model of a replica: against the engine's own scheduler, and by what must hold of any replica."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.cache.kv_manager import KVCacheManager
from penstock.engine.cache.layout import full_attention
from penstock.engine.config import SchedulerConfig
from penstock.engine.core.plan import StepResult
from penstock.engine.core.scheduling.scheduler import Scheduler
from penstock.engine.messages import AddRequest
from penstock.engine.sampling import SamplingParams
from penstock.prompt.hashing import BlockHasher
from penstock.sim.cache import KVPool
from penstock.sim.replica import ReplicaConfig, Running, SimReplica, StepReport
from penstock.sim.timing import StepTime
from penstock.sim.traces import TraceRequest

BLOCK = 4
TIME = StepTime(base_s=0.01, prefill_token_s=1e-3, row_s=1e-4, context_token_s=0.0)
HASHER = BlockHasher(BLOCK, "sim")
PREFIXES = [[10 * group + at for at in range(24)] for group in range(3)]

requests = st.lists(
    st.tuples(st.floats(0, 2), st.integers(0, 2), st.integers(1, 23), st.integers(1, 9), st.integers(1, 12)),
    min_size=1,
    max_size=14,
)
"""(arrival, group, tokens of the group's prefix, tokens of its own, output tokens)."""


def trace_of(drawn: Sequence[tuple[float, int, int, int, int]]) -> list[tuple[TraceRequest, list[int]]]:
    out: list[tuple[TraceRequest, list[int]]] = []
    for number, (at, group, shared, own, output) in enumerate(sorted(drawn)):
        tokens = PREFIXES[group][:shared] + [1000 + number] * own
        blocks = tuple(HASHER.hash(tokens))
        out.append((TraceRequest(number, at, len(tokens), output, blocks), tokens))
    return out


def simulated(trace: list[tuple[TraceRequest, list[int]]], config: ReplicaConfig) -> tuple[dict[int, Running], SimReplica]:
    done: dict[int, Running] = {}
    replica = SimReplica(config, BLOCK, done=lambda running: done.__setitem__(running.request.number, running))
    for request, _ in trace:
        replica.advance(request.at)
        replica.submit(request, request.at)
    replica.advance(math.inf)
    return done, replica


def scheduled(trace: list[tuple[TraceRequest, list[int]]], config: ReplicaConfig) -> dict[int, tuple[float, float, int]]:
    """(first token, last token, cached tokens) by the engine's scheduler, whose steps take what `TIME` says."""
    blocks = config.kv_tokens // BLOCK
    kv = KVCacheManager(blocks + 1, full_attention(BLOCK), enable_prefix_caching=True, watermark=0.0, max_in_flight=10_000)
    limits = SchedulerConfig(max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens)
    scheduler = Scheduler(limits, 64, kv, HASHER)
    now, coming = 0.0, list(trace)
    first, last, cached = dict[int, float](), dict[int, float](), dict[int, int]()
    number_of = dict[int, int]()
    while coming or scheduler.indexes():
        if not scheduler.indexes():
            now = max(now, coming[0][0].at)
        while coming and coming[0][0].at <= now:
            request, tokens = coming.pop(0)
            sampling = SamplingParams(max_tokens=request.output_tokens)
            scheduler.add(AddRequest(request.number, str(request.number), tokens, sampling, now), now)
        plan = scheduler.schedule(now)
        assert plan is not None
        for admission in plan.admissions:
            number = int(admission.token_ids[-1]) - 1000  # a prompt ends with tokens of its own
            number_of[admission.row] = number
            cached[number] = admission.num_computed_tokens
        rows = [number_of[row] for row in plan.rows.tolist()]
        prefill = sum(n for n, number in zip(plan.num_new_tokens.tolist(), rows, strict=True) if number not in first)
        now += TIME.steps(1, prefill=prefill, rows=sum(number in first for number in rows), context=0)
        for number, samples in zip(rows, plan.samples.tolist(), strict=True):
            if samples:
                first.setdefault(number, now)
                last[number] = now
        scheduler.update(StepResult(plan.step_id, np.full((len(rows), 1), 7, np.int32), plan.samples.astype(np.int32)), now)
    return {number: (first[number], last[number], cached[number]) for number in first}


@settings(max_examples=60)
@given(requests, st.integers(2, 6), st.sampled_from([8, 16, 64]))
def test_without_pressure_on_memory_the_model_is_the_engines_scheduler(
    drawn: list[tuple[float, int, int, int, int]], max_num_seqs: int, budget: int
) -> None:
    """Equal first and last tokens of every request, to the microsecond, and equal cached tokens."""
    config = ReplicaConfig(
        time=TIME, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, kv_tokens=4000 * BLOCK, watermark=0.0
    )
    trace = trace_of(drawn)
    done, replica = simulated(trace, config)
    expected = scheduled(trace, config)
    found = {number: (r.first_token, r.finished, r.hit_tokens) for number, r in done.items()}
    assert found.keys() == expected.keys()
    for number, figures in found.items():
        assert figures == pytest.approx(expected[number], abs=1e-6)
    assert replica.pool.used == 0


@settings(max_examples=60)
@given(requests, st.integers(12, 30))
def test_under_pressure_everybody_ends_and_nothing_is_lost(drawn: list[tuple[float, int, int, int, int]], blocks: int) -> None:
    stored: set[bytes] = set()
    ends: list[float] = []

    def stepped(step: StepReport) -> None:
        stored.update(replica.pool.stored)
        stored.difference_update(replica.pool.removed)
        replica.pool.stored, replica.pool.removed = [], []
        pool = replica.pool
        assert 0 <= pool.used <= pool.capacity
        assert all(pool.has(block) for block in stored)
        ends.append(step.end)

    done: list[Running] = []
    config = ReplicaConfig(time=TIME, max_num_seqs=8, max_num_batched_tokens=16, kv_tokens=blocks * BLOCK, watermark=0.0)
    replica = SimReplica(config, BLOCK, stepped, done.append)
    trace = trace_of(drawn)
    for request, _ in trace:
        replica.advance(request.at)
        assert replica.now <= request.at
        replica.submit(request, request.at)
    replica.advance(math.inf)
    assert sorted(running.request.number for running in done) == list(range(len(trace)))
    assert ends == sorted(ends)
    assert all(r.arrived < r.first_token <= r.finished and r.produced == r.request.output_tokens for r in done)
    assert (replica.pool.used, replica.backlog, replica.context) == (0, 0, 0)


def test_a_request_that_can_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than the KV cache"):
        SimReplica(ReplicaConfig(kv_tokens=64), BLOCK).submit(TraceRequest(0, 0.0, 100, 1, ()), 0.0)


def test_the_last_blocks_of_a_request_are_evicted_first() -> None:
    pool = KVPool(4)
    assert pool.take(3)
    for block in (b"a", b"b", b"c"):
        pool.publish(block)
    pool.release([b"a", b"b", b"c"], 0)
    assert pool.take(2)
    assert (pool.removed, pool.depth([b"a", b"b", b"c"])) == ([b"c"], 2)
    assert not pool.take(3)


@given(st.floats(0, 5), st.integers(1, 50), st.integers(0, 10_000), st.integers(1, 400))
def test_steps_that_fit_do_and_one_more_does_not(seconds: float, rows: int, context: int, most: int) -> None:
    time = StepTime(context_token_s=1e-6)
    count = time.fitting(seconds, rows=rows, context=context, most=most)
    assert 0 <= count <= most
    assert time.steps(count, prefill=0, rows=rows, context=context) <= seconds or count == 0
    assert count == most or time.steps(count + 1, prefill=0, rows=rows, context=context) > seconds
