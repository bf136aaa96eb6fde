"""The autoscaling policy, driven look by look in made-up time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.api.fleet import LATENCY_EDGES_S
from penstock.api.load_report import WAITING_REASONS, LoadReport
from penstock.operator.autoscale.bounds import Decision
from penstock.operator.autoscale.coldstart import Starting
from penstock.operator.autoscale.limits import Goals, Hint, Limits, ModelLimits, Settings
from penstock.operator.autoscale.policy import Memory, Observation, PoolView, decide
from penstock.operator.autoscale.signals import PoolSignals, ReplicaSignal

LIMITS = Limits(min_replicas=1, max_replicas=10, down_window_s=60)
SETTINGS = Settings()
WIDTH = 8
CARRIES = WIDTH * LIMITS.target_utilization


def signals(
    count: int,
    running: float = 0,
    *,
    held: int = 0,
    age: float = 0.5,
    kv: float = 0.0,
    figures: dict[str, float] | None = None,
    **waiting: int,
) -> PoolSignals:
    """`count` ready replicas with `running` requests each; what waits, waits at the first."""
    reports = [
        LoadReport(
            epoch=1,
            seq=1,
            num_requests_running=round(running),
            num_requests_waiting=waiting if index == 0 else {},  # type: ignore[arg-type]
            max_num_seqs=WIDTH,
            kv_cache_usage_perc=kv,
            **(figures or {}),  # type: ignore[arg-type]
        )
        for index in range(count)
    ]
    return PoolSignals(held, tuple(ReplicaSignal(str(i), True, False, 0, report, age) for i, report in enumerate(reports)))


Loads = dict[str, PoolSignals | None]


class Model:
    """A model whose pools do what the policy says, at once."""

    def __init__(self, sizes: dict[str, int], limits: ModelLimits) -> None:
        self.sizes, self.limits = dict(sizes), limits
        self.now, self.wall, self.memory = 0.0, 1_800_000_000.0, Memory()
        self.decisions: dict[str, Decision] = {}

    def look(
        self,
        loads: Loads,
        *,
        after: float = 5.0,
        pending: dict[str, tuple[float, ...]] | None = None,
        troubled: Sequence[str] = (),
        started: dict[str, tuple[float, ...]] | None = None,
    ) -> None:
        self.now += after
        self.wall += after
        views = {
            name: PoolView(
                self.sizes[name],
                tuple(Starting(age, name in troubled) for age in (pending or {}).get(name, ())),
                load,
                (started or {}).get(name, ()),
            )
            for name, load in loads.items()
        }
        self.decisions, self.memory = decide(Observation(self.now, self.wall, views), self.limits, SETTINGS, self.memory)
        self.sizes = {name: decision.replicas for name, decision in self.decisions.items()}


class Pool:
    """A model of one pool."""

    def __init__(self, replicas: int, limits: Limits = LIMITS) -> None:
        self.model = Model({"p": replicas}, ModelLimits({"p": limits}))

    @property
    def replicas(self) -> int:
        return self.model.sizes["p"]

    @replicas.setter
    def replicas(self, count: int) -> None:
        self.model.sizes["p"] = count

    @property
    def decision(self) -> Decision:
        return self.model.decisions["p"]

    @property
    def now(self) -> float:
        return self.model.now

    def look(
        self,
        load: PoolSignals | None,
        *,
        after: float = 5.0,
        pending: tuple[float, ...] = (),
        started: tuple[float, ...] = (),
    ) -> Decision:
        self.model.look({"p": load}, after=after, pending={"p": pending}, started={"p": started})
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
def test_waiting_for_something_else_buys_no_replica_and_is_named(reason: str) -> None:
    pool = Pool(1)
    pool.run(120, lambda p: signals(p.replicas, 2, **{reason: 50}))
    assert pool.replicas == 1
    assert pool.decision.inputs[f"waiting_for_{reason}"] == 50
    assert f"50 wait for {reason}" in pool.decision.reason


@pytest.mark.req("SC-07")
def test_a_steady_load_settles_and_stays() -> None:
    pool = Pool(1)
    sizes = pool.run(600, lambda p: signals(p.replicas, 24 / p.replicas))
    assert len(set(sizes[30:])) == 1
    assert sizes[-1] * CARRIES >= 24


@settings(max_examples=40)
@given(st.floats(0.05, 9.0), st.integers(1, 10), st.lists(st.floats(-0.04, 0.04), min_size=8, max_size=8))
def test_at_constant_load_no_size_is_left_twice(demand: float, start: int, noise: list[float]) -> None:
    """Whatever the noise of a few per cent, a pool that has settled shrinks or grows no more than once."""
    pool = Pool(start)

    def load(p: Pool) -> PoolSignals:
        part = demand * LIMITS.target_kv_usage * (1 + noise[round(p.now / 5) % len(noise)])
        return signals(p.replicas, kv=part / p.replicas) if p.replicas else signals(0)

    sizes = pool.run(400, load)[24:]
    changes = [after - before for before, after in pairwise(sizes) if after != before]
    assert not any(change > 0 for change in changes[1:]) or not any(change < 0 for change in changes), sizes
    assert len(changes) <= 1, sizes


@pytest.mark.req("SC-07")
def test_a_square_wave_shorter_than_the_window_does_not_flap() -> None:
    pool = Pool(1)
    wave = lambda p: signals(p.replicas, 30 / p.replicas if int(p.now / 20) % 2 else 0)  # noqa: E731
    sizes = pool.run(600, wave)
    changes = sum(a != b for a, b in pairwise(sizes[40:]))
    assert changes == 0


@pytest.mark.req("SC-11")
@pytest.mark.parametrize("load", [None, signals(4, 0, age=60.0)], ids=["no gateway", "stale reports"])
def test_missing_data_never_shrinks_and_is_said(load: PoolSignals | None) -> None:
    pool = Pool(4)
    pool.run(600, lambda _: load)
    assert pool.replicas == 4
    assert pool.decision.constraint == "NoData"
    assert pool.decision.blind


def test_a_report_that_is_late_once_is_no_blindness() -> None:
    pool = Pool(4)
    pool.run(60, lambda p: signals(p.replicas, 1))
    assert not pool.look(signals(4, 1, age=60.0)).blind


@pytest.mark.req("SC-11")
def test_without_gateways_replicas_grow_a_pool_and_never_shrink_it() -> None:
    pool = Pool(4)
    pool.run(300, lambda p: replace(signals(p.replicas), complete=False))
    assert (pool.replicas, pool.decision.constraint, pool.decision.blind) == (4, "NoData", True)
    pool.run(60, lambda p: replace(signals(p.replicas, kv=0.99), complete=False))
    assert pool.replicas > 4


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
    assert pool.replicas == 1 + LIMITS.max_up_step
    pool.look(signals(5, WIDTH, capacity=400), after=5)
    assert pool.replicas == 5, "the same period allows no more"
    pool.look(signals(5, WIDTH, capacity=400), after=20)
    assert pool.replicas == 10


@pytest.mark.parametrize(("waiting", "panics"), [(15, False), (16, True)])
def test_panic_begins_where_demand_is_twice_what_is_ready(waiting: int, panics: bool) -> None:
    """Four replicas carry 24 requests; 48 are twice as many."""
    pool = Pool(4, replace(LIMITS, max_replicas=50))
    pool.run(60, lambda p: signals(4, 6))
    assert pool.replicas == 4
    burst = pool.look(signals(4, WIDTH, capacity=waiting), after=SETTINGS.panic_window_s + 1)
    assert burst.replicas == (8 if panics else 4), "the average of the stable window alone is within the tolerance"
    calm = pool.look(signals(pool.replicas), after=SETTINGS.panic_window_s + 1)
    assert (calm.constraint == "Panic") is panics


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


@pytest.mark.req("SC-10")
def test_while_replicas_start_no_more_are_asked_for() -> None:
    pool = Pool(1)
    pool.look(signals(1, WIDTH, capacity=16))
    asked = pool.replicas
    for age in range(5, 40, 5):
        pool.look(signals(1, WIDTH, capacity=16), pending=(float(age),) * (asked - 1))
    assert pool.replicas == asked == 4  # 24 requests at six each


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


@pytest.mark.req("SC-15")
@pytest.mark.parametrize("reason", ["lora", "grammar", "remote_kv", "paused"])
def test_no_pool_goes_to_zero_while_a_request_waits_for_whatever_reason(reason: str) -> None:
    pool = Pool(1, Limits(min_replicas=0, max_replicas=4, scale_to_zero_after_s=30, down_window_s=0))
    assert reason in WAITING_REASONS
    pool.run(120, lambda p: signals(p.replicas, **{reason: 5}))
    assert pool.replicas == 1
    pool.run(60, lambda p: signals(p.replicas))
    assert pool.replicas == 0


@pytest.mark.req("SC-15")
def test_no_pool_goes_to_zero_while_a_request_is_on_its_way() -> None:
    pool = Pool(1, Limits(min_replicas=0, max_replicas=4, scale_to_zero_after_s=30, down_window_s=0))

    def on_its_way(p: Pool) -> PoolSignals:
        load = signals(p.replicas)
        return replace(load, replicas=tuple(replace(it, in_flight=1) for it in load.replicas))

    pool.run(120, on_its_way)
    assert pool.replicas == 1


@pytest.mark.req("SC-15")
def test_what_rates_say_of_the_past_keeps_no_idle_replica() -> None:
    pool = Pool(1, Limits(min_replicas=0, max_replicas=4, scale_to_zero_after_s=10, down_window_s=0))
    pool.run(30, lambda p: signals(p.replicas, 2, figures={"generation_tokens_per_s": 50.0, "decode_step_s": 0.02}))
    pool.run(20, lambda p: signals(p.replicas, 0, figures={"generation_tokens_per_s": 0.001, "decode_step_s": 0.02}))
    assert pool.replicas == 0


def test_cold_start_is_learned_from_what_was_seen() -> None:
    pool = Pool(2)
    assert pool.model.memory.pools == {} or pool.model.memory.pools["p"].cold_start.seconds == 30.0
    pool.look(signals(1), started=(70.0,))
    assert pool.model.memory.pools["p"].cold_start.seconds == 70.0, "the first start counts whole: before it was only assumed"
    pool.look(signals(1), started=(30.0, 1e9))
    assert pool.model.memory.pools["p"].cold_start.seconds == pytest.approx(((70 + 30) / 2 + 3600) / 2)


def test_a_replica_that_stops_being_ready_or_is_deleted_teaches_nothing() -> None:
    pool = Pool(2)
    pool.look(signals(1), pending=(3600.0,))
    pool.look(signals(2), pending=())
    assert pool.model.memory.pools["p"].cold_start.learned_s is None


def test_before_the_first_start_only_what_has_trouble_counts_as_stuck() -> None:
    """A large model takes minutes to load: the dearer pool must not start the same demand again meanwhile."""
    pools = {"cheap": replace(LIMITS, cost=10), "dear": replace(LIMITS, min_replicas=0, cost=50)}

    def dear(troubled: Sequence[str], until: int) -> int:
        model = Model({"cheap": 4, "dear": 0}, ModelLimits(pools))
        for age in range(5, until, 5):
            each = 4 * 0.8 / (1 + model.sizes["dear"])
            loads = {"cheap": signals(1, kv=each), "dear": signals(model.sizes["dear"], kv=each)}
            model.look(loads, pending={"cheap": (float(age),) * 3}, troubled=troubled)
        return model.sizes["dear"]

    assert dear([], 300) == 0
    assert dear(["cheap"], 300) == 3
    assert dear([], 900) == 3, "ten minutes are enough"


BUSY = {"prefill_tokens_per_s": 1000.0, "prompt_tokens_per_s": 900.0}


@pytest.mark.req("SC-03")
def test_capacity_is_learned_from_what_replicas_measure() -> None:
    """Few requests, far from any width or memory, that keep the replica computing prompts nine tenths of the time."""
    pool = Pool(1)
    pool.run(120, lambda p: signals(p.replicas, 1, figures={**BUSY, "prompt_tokens_per_s": 900.0 / p.replicas}))
    assert pool.replicas == 2
    assert pool.decision.inputs["work"] == pytest.approx(0.9 / LIMITS.target_utilization, rel=0.01)


def test_a_backlog_that_grows_is_demand_before_it_is_computed() -> None:
    pool, tokens = Pool(1), 0
    for _ in range(6):
        tokens += 10_000  # 2,000 tokens a second more than the 1,000 that are computed
        figures = {"prefill_tokens_per_s": 1000.0, "prompt_tokens_per_s": 1000.0, "prefill_backlog_tokens": tokens}
        pool.look(signals(1, 1, figures=figures))
    assert pool.decision.inputs["prompt_tokens_per_s"] == pytest.approx(3000)
    assert pool.replicas >= 3000 / 1000 / LIMITS.target_utilization


@pytest.mark.req("SC-08", "PD-32")
def test_each_role_follows_its_own_signal_and_pools_move_opposite_ways() -> None:
    limits = ModelLimits({"pre": replace(LIMITS, role="Prefill"), "dec": replace(LIMITS, role="Decode")})
    model = Model({"pre": 3, "dec": 3}, limits)

    def load(prompt: float, rows: float) -> Loads:
        prefill = {"prefill_tokens_per_s": 1000.0, "prompt_tokens_per_s": prompt / model.sizes["pre"]}
        decode = {"generation_tokens_per_s": rows / model.sizes["dec"] / 0.1, "decode_step_s": 0.1}
        return {
            "pre": signals(model.sizes["pre"], 1, figures=prefill),
            "dec": signals(model.sizes["dec"], rows / model.sizes["dec"], figures=decode),
        }

    for _ in range(40):
        model.look(load(prompt=5000, rows=6))
    long_prompts = dict(model.sizes)
    for _ in range(60):
        model.look(load(prompt=500, rows=40))
    assert long_prompts["pre"] > 5 > 2 > long_prompts["dec"]
    assert model.sizes["pre"] == 1 and model.sizes["dec"] > 5


@pytest.mark.req("SC-12")
def test_requests_parked_for_kv_are_the_prefill_pool_s() -> None:
    limits = ModelLimits({"pre": replace(LIMITS, role="Prefill"), "dec": replace(LIMITS, role="Decode")})
    model = Model({"pre": 1, "dec": 1}, limits)
    for _ in range(24):
        model.look({"pre": signals(model.sizes["pre"]), "dec": signals(model.sizes["dec"], remote_kv=20)})
    assert model.sizes["pre"] > 1
    assert model.sizes["dec"] == 1


def test_the_ratio_of_prefill_to_decode_raises_the_side_that_is_short() -> None:
    pools = {"pre": replace(LIMITS, role="Prefill"), "dec": replace(LIMITS, role="Decode")}
    model = Model({"pre": 1, "dec": 1}, ModelLimits(pools, prefill_per_decode=(0.5, 2.0)))  # type: ignore[arg-type]
    for _ in range(30):
        model.look({"pre": signals(model.sizes["pre"]), "dec": signals(model.sizes["dec"], kv=6 * 0.8 / model.sizes["dec"])})
    assert model.sizes == {"pre": 3, "dec": 6}
    assert model.decisions["pre"].constraint == "Ratio"


def test_the_cheapest_pool_grows_first_and_the_dearest_shrinks_first() -> None:
    pools = {"cheap": replace(LIMITS, max_replicas=3, cost=10), "dear": replace(LIMITS, min_replicas=0, cost=50)}
    model = Model({"cheap": 1, "dear": 0}, ModelLimits(pools))

    def load(demand: float) -> Loads:
        each = demand * 0.8 / sum(model.sizes.values())
        return {name: signals(count, kv=each) for name, count in model.sizes.items()}

    for _ in range(24):
        model.look(load(2.5))
    assert model.sizes == {"cheap": 3, "dear": 0}
    for _ in range(24):
        model.look(load(4.5))
    assert model.sizes == {"cheap": 3, "dear": 2}
    for _ in range(48):
        model.look(load(1.5))
    assert model.sizes == {"cheap": 2, "dear": 0}


def test_where_replicas_do_not_start_the_next_pool_carries_their_share() -> None:
    pools = {"cheap": replace(LIMITS, cost=10), "dear": replace(LIMITS, min_replicas=0, cost=50)}
    model = Model({"cheap": 4, "dear": 0}, ModelLimits(pools))
    for age in range(5, 200, 5):
        each = 4 * 0.8 / (1 + model.sizes["dear"])
        loads = {"cheap": signals(1, kv=each), "dear": signals(model.sizes["dear"], kv=each)}
        model.look(loads, pending={"cheap": (float(age),) * 3}, started={"cheap": (30.0,)})
    assert model.sizes["cheap"] == 4, "they are still wanted, should there be room"
    assert model.sizes["dear"] == 3


def test_the_budget_binds_and_is_named() -> None:
    model = Model({"p": 2}, ModelLimits({"p": replace(LIMITS, cost=10)}, budget=45))
    for _ in range(12):
        model.look({"p": signals(model.sizes["p"], kv=0.99)})
    assert (model.sizes["p"], model.decisions["p"].constraint) == (4, "Budget")


def test_a_schedule_is_met_a_cold_start_early() -> None:
    hint = Hint("0 8 * * *", "UTC", 3600.0, 4)
    model = Model({"p": 1}, ModelLimits({"p": replace(LIMITS, schedule=(hint,))}))
    model.wall = 86_400.0 * 365 + 8 * 3600 - 100  # 100 s before eight
    model.look({"p": signals(1)}, after=40)
    assert model.sizes["p"] == 1
    model.look({"p": signals(1)}, after=40)  # 20 s before, and a replica takes 30 s
    assert (model.sizes["p"], model.decisions["p"].constraint) == (4, "Schedule")


def test_the_slo_that_is_missed_corrects_the_demand_and_says_so() -> None:
    goals = Goals(ttft_s=1.0, itl_s=None, share=0.95)
    pool = Pool(3, replace(LIMITS, goals=goals))
    late, edges = [0] * (len(LATENCY_EDGES_S) + 1), len(LATENCY_EDGES_S)
    sizes: list[int] = []
    for _ in range(200):
        late[edges] += 5 if pool.replicas < 5 else 0  # five late ones in each look until there are five replicas
        late[0] += 20
        load = replace(signals(pool.replicas, 15 / pool.replicas), ttft_counts=tuple(late))
        pool.look(load)
        sizes.append(pool.replicas)
    assert sizes[0] == 3 and max(sizes) == 5
    assert "for the SLO" in pool.decision.reason
    assert 1.4 < pool.decision.inputs["slo_factor"] <= 2.0


def _step_s(rows: float) -> float:
    return 0.020 + 0.001 * rows


@pytest.mark.parametrize("itl_s", [0.010, 0.0205])
def test_an_itl_goal_below_a_step_over_one_request_is_ignored_and_said(itl_s: float) -> None:
    """24 requests fit three replicas of eight; no number of replicas would make a step faster than its weights are read."""
    limits = replace(LIMITS, max_replicas=32, goals=Goals(ttft_s=None, itl_s=itl_s))
    pool = Pool(4, limits)
    for look in range(120):
        running = 4 + look % 4
        pool.look(signals(pool.replicas, min(running, 24 / pool.replicas), figures={"decode_step_s": _step_s(running)}))
    assert pool.replicas <= 5
    assert "ITL goal" in pool.decision.out_of_reach and pool.decision.out_of_reach in pool.decision.reason
    assert pool.decision.inputs["slo_factor"] <= 1.0


def test_an_itl_goal_that_can_be_met_sizes_the_pool() -> None:
    pool = Pool(4, replace(LIMITS, max_replicas=32, goals=Goals(ttft_s=None, itl_s=0.024)))
    for look in range(60):
        running = round(24 / pool.replicas) + look % 2
        pool.look(signals(pool.replicas, running, figures={"decode_step_s": _step_s(running)}))
    assert pool.replicas >= 6 and not pool.decision.out_of_reach


def test_a_ttft_goal_that_more_replicas_do_not_bring_closer_is_given_up_and_tried_again() -> None:
    pool = Pool(3, replace(LIMITS, max_replicas=20, goals=Goals(ttft_s=0.01, itl_s=None, share=0.95)))
    counts, sizes, factors, said = [0] * (len(LATENCY_EDGES_S) + 1), list[int](), list[float](), list[str]()
    for _ in range(2400):  # 200 minutes
        counts[6] += 25  # all late, whatever the number of replicas
        pool.look(replace(signals(pool.replicas, 15 / pool.replicas), ttft_counts=tuple(counts)))
        sizes.append(pool.replicas)
        factors.append(pool.decision.inputs["slo_factor"])
        said.append(pool.decision.out_of_reach)
    assert max(factors) == 2.0, "it was tried"
    first = factors.index(2.0)
    back = next(look for look in range(first, len(sizes)) if sizes[look] == 3)
    assert (back - first) * 5 < 1800 and "TTFT goal" in said[back]
    assert 2.0 in factors[back:], "an hour later it is tried again: the load may be another one"
    assert sum(size > 3 for size in sizes) < len(sizes) / 2


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
Look = tuple[PoolSignals | None, PoolSignals | None, float, list[float]]
histories = st.lists(st.tuples(loads, loads, st.floats(0.1, 60), st.lists(st.floats(0, 100), max_size=3)), max_size=20)


@settings(max_examples=60)
@given(histories, st.integers(0, 3), st.integers(0, 6), st.integers(0, 12), st.integers(0, 12), st.integers(30, 200))
def test_the_user_s_limits_hold_whatever_happens(
    looks: list[Look],
    least: int,
    more: int,
    one: int,
    two: int,
    budget: int,
) -> None:
    limits = Limits(least, least + more, down_window_s=30, scale_to_zero_after_s=60, cost=10)
    model = Model({"a": one, "b": two}, ModelLimits({"a": limits, "b": replace(limits, cost=5)}, budget=budget))
    for first, second, after, pending in looks:
        model.look({"a": first, "b": second}, after=after, pending={"a": tuple(pending)})
        for decision in model.decisions.values():
            assert least <= decision.replicas <= least + more
            assert decision.reason
        spent = 10 * model.sizes["a"] + 5 * model.sizes["b"]
        assert spent <= max(budget, 15 * least)


@settings(max_examples=60)
@given(histories, st.integers(0, 6))
def test_missing_data_shrinks_nothing_whatever_came_before(looks: list[Look], size: int) -> None:
    pool = Pool(size, Limits(0, 6, down_window_s=30, scale_to_zero_after_s=60))
    for load, _, after, pending in looks:
        pool.look(load, after=after, pending=tuple(pending))
    before = pool.replicas
    pool.look(None, after=1000)
    assert pool.replicas == before
    blind = signals(max(before, 1), age=1e3)
    pool.look(blind, after=1000)
    assert pool.replicas >= before


@settings(max_examples=60)
@given(histories, loads, st.integers(1, 4))
def test_more_load_never_asks_for_less(looks: list[Look], load: PoolSignals | None, factor: int) -> None:
    if load is None:
        return
    pool = Pool(3, Limits(1, 50, down_window_s=30))
    for before, _, after, pending in looks:
        pool.look(before, after=after, pending=tuple(pending))
    sizes: list[int] = []
    for times in (1, factor):
        more = replace(load, held=load.held * times, replicas=tuple(_times(replica, times) for replica in load.replicas))
        seen = Observation(pool.now + 5, 0.0, {"p": PoolView(pool.replicas, (), more)})
        decided, _ = decide(seen, pool.model.limits, SETTINGS, pool.model.memory)
        again, _ = decide(seen, pool.model.limits, SETTINGS, pool.model.memory)
        assert decided == again, "the same input gives the same output"
        sizes.append(decided["p"].replicas)
    assert sizes[0] <= sizes[1]


def _times(replica: ReplicaSignal, times: int) -> ReplicaSignal:
    assert replica.report is not None
    waiting = {reason: count * times for reason, count in replica.report.num_requests_waiting.items()}
    report = LoadReport(
        epoch=1,
        seq=1,
        num_requests_running=replica.report.num_requests_running * times,
        num_requests_waiting=waiting,
        max_num_seqs=WIDTH,
        kv_cache_usage_perc=replica.report.kv_cache_usage_perc * times,
    )
    return replace(replica, report=report)


def test_targets_and_growth_are_the_pools_own() -> None:
    fuller = Pool(1, replace(LIMITS, max_replicas=50, target_utilization=1.0))
    assert fuller.look(signals(1, WIDTH)).replicas == 1
    slower = Pool(10, replace(LIMITS, max_replicas=50, max_up_factor=1.2, max_up_step=1, up_period_s=60))
    for _ in range(3):
        slower.look(signals(10, WIDTH, capacity=400), after=15)
    assert slower.replicas == 12, "a fifth, once in a minute"
    cached = Pool(1, replace(LIMITS, target_kv_usage=0.4))
    assert cached.look(signals(1, 1, kv=0.8)).inputs["kv"] == 2.0


def test_a_cold_start_is_assumed_as_the_pool_says_until_one_is_seen() -> None:
    pool = Pool(2, replace(LIMITS, cold_start_s=300))
    pool.look(signals(1))
    assert pool.decision.inputs["cold_start_s"] == 300
    pool.look(signals(2), started=(40.0,))
    assert pool.decision.inputs["cold_start_s"] == 40
