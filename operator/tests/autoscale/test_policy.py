"""The autoscaling policy, driven look by look in made-up time."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.load_report import LoadReport
from penstock.operator.autoscale.policy import Decision, Limits, Memory, Observation, Settings, decide
from penstock.operator.autoscale.signals import PoolSignals, ReplicaSignal

LIMITS = Limits(min_replicas=1, max_replicas=10, down_window_s=60)
SETTINGS = Settings()
WIDTH = 8
CARRIES = WIDTH * SETTINGS.target_utilization


def signals(count: int, running: float = 0, *, held: int = 0, age: float = 0.5, kv: float = 0.0, **waiting: int) -> PoolSignals:
    """`count` ready replicas with `running` requests each; what waits, waits at the first."""
    reports = [
        LoadReport(
            epoch=1,
            seq=1,
            num_requests_running=round(running),
            num_requests_waiting=waiting if index == 0 else {},  # type: ignore[arg-type]
            max_num_seqs=WIDTH,
            kv_cache_usage_perc=kv,
        )
        for index in range(count)
    ]
    return PoolSignals(held, tuple(ReplicaSignal(str(i), True, False, 0, report, age) for i, report in enumerate(reports)))


class Pool:
    """A pool that does what the policy says, at once."""

    def __init__(self, replicas: int, limits: Limits = LIMITS) -> None:
        self.replicas, self.limits, self.now, self.memory = replicas, limits, 0.0, Memory()
        self.decision = Decision(replicas, "Demand", "")

    def look(self, load: PoolSignals | None, *, after: float = 5.0, pending: tuple[float, ...] = ()) -> Decision:
        self.now += after
        seen = Observation(self.now, self.replicas, pending, load)
        self.decision, self.memory = decide(seen, self.limits, SETTINGS, self.memory)
        self.replicas = self.decision.replicas
        return self.decision

    def run(self, seconds: float, load: Callable[["Pool"], PoolSignals | None]) -> list[int]:
        sizes: list[int] = []
        for _ in range(int(seconds // 5)):
            self.look(load(self))
            sizes.append(self.replicas)
        return sizes


@pytest.mark.req("SC-01", "SC-02")
@pytest.mark.parametrize("kind", ["requests", "kv", "queue"])
def test_queue_and_kv_each_alone_ask_for_replicas(kind: str) -> None:
    pool = Pool(1)
    load = {
        "requests": lambda p: signals(p.replicas, min(WIDTH, 20 / p.replicas)),
        "kv": lambda p: signals(p.replicas, 1, kv=0.95),
        "queue": lambda p: signals(p.replicas, 2, capacity=12),
    }[kind]
    pool.run(30, load)
    assert pool.replicas > 1


@pytest.mark.req("SC-12")
@pytest.mark.parametrize("reason", ["lora", "grammar", "remote_kv"])
def test_waiting_for_something_else_buys_no_replica(reason: str) -> None:
    pool = Pool(1)
    pool.run(120, lambda p: signals(p.replicas, 2, **{reason: 50}))
    assert pool.replicas == 1
    assert pool.decision.inputs["waiting_for_other_reasons"] == 50


@pytest.mark.req("SC-07")
def test_a_steady_load_settles_and_stays() -> None:
    pool = Pool(1)
    sizes = pool.run(600, lambda p: signals(p.replicas, 24 / p.replicas))
    assert len(set(sizes[30:])) == 1
    assert sizes[-1] * CARRIES >= 24


@pytest.mark.req("SC-07")
def test_a_square_wave_shorter_than_the_window_does_not_flap() -> None:
    pool = Pool(1)
    wave = lambda p: signals(p.replicas, 30 / p.replicas if int(p.now / 20) % 2 else 0)  # noqa: E731
    sizes = pool.run(600, wave)
    changes = sum(a != b for a, b in pairwise(sizes[40:]))
    assert changes == 0


@pytest.mark.req("SC-11")
@pytest.mark.parametrize("load", [None, signals(4, 0, age=60.0)], ids=["no gateway", "stale reports"])
def test_missing_data_never_shrinks(load: PoolSignals | None) -> None:
    pool = Pool(4)
    pool.run(600, lambda _: load)
    assert pool.replicas == 4
    assert pool.decision.constraint == "NoData"


@pytest.mark.req("SC-11")
def test_an_idle_pool_shrinks_to_min_after_the_down_window_and_says_why() -> None:
    pool = Pool(4)
    sizes = pool.run(55, lambda p: signals(p.replicas))
    assert set(sizes) == {4}
    assert pool.decision.constraint == "DownWindow"
    pool.run(60, lambda p: signals(p.replicas))
    assert pool.replicas == 1


def test_a_restarted_autoscaler_shrinks_nothing_for_a_whole_window() -> None:
    pool = Pool(6)
    sizes = pool.run(LIMITS.down_window_s - 5, lambda p: signals(p.replicas))
    assert set(sizes) == {6}


def test_a_burst_is_answered_at_once_and_growth_is_bounded() -> None:
    pool = Pool(1, replace(LIMITS, max_replicas=50))
    decision = pool.look(signals(1, WIDTH, capacity=400))
    assert decision.constraint == "UpRate"
    assert pool.replicas == 1 + SETTINGS.max_up_step
    pool.look(signals(5, WIDTH, capacity=400), after=5)
    assert pool.replicas == 5, "the same period allows no more"
    pool.look(signals(5, WIDTH, capacity=400), after=20)
    assert pool.replicas == 10


def test_max_binds_and_is_named() -> None:
    pool = Pool(9)
    decision = pool.look(signals(9, WIDTH, capacity=400))
    assert (decision.replicas, decision.constraint) == (10, "Max")


@pytest.mark.req("SC-10")
def test_starting_replicas_are_not_taken_away_again() -> None:
    pool = Pool(1, replace(LIMITS, down_window_s=5))
    pool.run(60, lambda p: signals(p.replicas))
    pool.replicas = 3
    decision = pool.look(signals(1), pending=(2.0, 2.0))
    assert (decision.replicas, decision.constraint) == (3, "Pending")


@pytest.mark.req("SC-05")
def test_warm_replicas_come_on_top_of_demand() -> None:
    plain, warm = Pool(1), Pool(1, replace(LIMITS, warm=2))
    for pool in (plain, warm):
        pool.run(60, lambda p: signals(p.replicas, 10 / p.replicas))
    assert warm.replicas == plain.replicas + 2


@pytest.mark.req("SC-15")
def test_zero_after_idleness_and_back_for_a_held_request() -> None:
    pool = Pool(1, Limits(min_replicas=0, max_replicas=4, scale_to_zero_after_s=100, down_window_s=30))
    pool.run(90, lambda p: signals(p.replicas))
    assert pool.replicas == 1
    pool.run(60, lambda p: signals(p.replicas))
    assert pool.replicas == 0
    assert pool.look(signals(0, held=1), after=1).replicas == 1


def test_cold_start_is_learned_from_what_was_seen() -> None:
    pool = Pool(2)
    for age in (10.0, 40.0, 70.0):
        pool.look(signals(1), pending=(age,))
    pool.look(signals(2))
    assert pool.memory.cold_start_s == pytest.approx((30 + 70) / 2)


loads = st.one_of(
    st.none(),
    st.builds(
        lambda count, running, held, age, kv, queue: signals(count, running, held=held, age=age, kv=kv, capacity=queue),
        st.integers(0, 6),
        st.integers(0, WIDTH),
        st.integers(0, 50),
        st.floats(0, 100),
        st.floats(0, 1),
        st.integers(0, 100),
    ),
)


@given(
    st.lists(st.tuples(loads, st.floats(0.1, 60), st.lists(st.floats(0, 100), max_size=3)), max_size=30),
    st.integers(0, 3),
    st.integers(0, 6),
    st.integers(0, 12),
)
def test_the_user_s_limits_hold_whatever_happens(
    looks: list[tuple[PoolSignals | None, float, list[float]]], least: int, more: int, start: int
) -> None:
    pool = Pool(start, Limits(least, least + more, down_window_s=30, scale_to_zero_after_s=60))
    for load, after, pending in looks:
        before = pool.replicas
        decision = pool.look(load, after=after, pending=tuple(pending))
        assert least <= decision.replicas <= least + more
        assert decision.reason
        if load is None:
            assert decision.replicas == min(max(before, least), least + more)
