"""HPA and KPA as they are documented, and a pool that follows a scaler."""

from pathlib import Path

import pytest

from penstock.operator.autoscale.limits import Limits, Settings
from penstock.sim.elastic import Look, run
from penstock.sim.outcome import Slo
from penstock.sim.replica import ReplicaConfig
from penstock.sim.scalers import HpaScaler, KpaScaler, PenstockScaler
from penstock.sim.timing import StepTime
from penstock.sim.traces import Trace, TraceRequest, load_azure, trace_folder

AZURE = trace_folder(Path(__file__)) / "azure-2023-code.csv"


def hpa() -> HpaScaler:
    return HpaScaler(target=10.0, least=1, most=100)


def test_hpa_takes_the_ratio_rounded_up_and_tolerates_a_tenth() -> None:
    assert hpa().next(0.0, 2, [20.0, 20.0]) == 4
    assert hpa().next(0.0, 2, [10.9, 10.9]) == 2
    assert hpa().next(0.0, 3, [14.0, 14.0, 14.0]) == 5


def test_hpa_counts_pods_without_metrics_as_idle_when_growing_and_as_full_when_shrinking() -> None:
    assert hpa().next(0.0, 3, [30.0], missing=2) == 3  # 30 over three pods: nothing to do
    assert hpa().next(0.0, 4, [60.0, 60.0], missing=2) == 8  # of the twelve that 120 over four pods ask for
    scaler = hpa()
    assert scaler._replicas(4, [2.0, 2.0], 0, 2) == 3  # 24 over four pods, not 4 over two
    assert hpa().next(0.0, 4, [20.0, 20.0], unready=2) == 4, "those that start will carry it"


def test_hpa_grows_by_four_or_twofold_in_15_s_and_shrinks_to_the_most_of_300_s() -> None:
    scaler = hpa()
    assert scaler.next(0.0, 1, [500.0]) == 5
    assert scaler.next(14.0, 5, [100.0] * 5) == 5
    assert scaler.next(15.0, 5, [100.0] * 5) == 10
    assert scaler.next(30.0, 10, [10.0] * 10) == 10
    assert [scaler.next(at, 10, [1.0] * 10) for at in (45.0, 300.0, 331.0)] == [10, 10, 1]


def test_kpa_averages_a_minute_and_shrinks_by_half_at_most() -> None:
    scaler = KpaScaler(target=10.0, least=1, most=100)
    assert scaler.next(0.0, 40.0, 4) == 4
    for at in range(2, 60, 2):
        scaler.next(float(at), 40.0, 4)
    assert scaler.next(60.0, 70.0, 4) == 5  # the mean moved by one sample of thirty
    for at in range(62, 140, 2):
        last = scaler.next(float(at), 0.0, 8)
    assert last == 4


def test_kpa_panics_at_twice_what_is_ready_and_never_shrinks_while_it_does() -> None:
    scaler = KpaScaler(target=10.0, least=1, most=100)
    for at in range(0, 60, 2):
        scaler.next(float(at), 10.0, 1)
    sizes = [scaler.next(float(at), 60.0, 1) for at in (60, 62, 64)]
    assert sizes[-1] == 6
    assert [scaler.next(float(at), 0.0, 6) for at in (66, 90, 122)] == [6, 6, 6]
    assert scaler.next(190.0, 0.0, 6) == 3


SLOW = ReplicaConfig(time=StepTime(base_s=0.022, prefill_token_s=88e-6, row_s=30e-6, context_token_s=152e-9))
"""An 8B model on an L40S."""


class Always:
    """Wants the same at all times."""

    period_s = 5.0

    def __init__(self, sizes: dict[float, int]) -> None:
        self.sizes, self.looks = sizes, list[Look]()

    def size(self, look: Look) -> int:
        self.looks.append(look)
        return [count for at, count in self.sizes.items() if at <= look.now][-1]


def steady(seconds: int, rate: int, prompt: int = 500) -> Trace:
    return Trace("t", 512, [TraceRequest(n, n / rate, prompt, 20, ()) for n in range(seconds * rate)])


def test_replicas_are_paid_from_creation_to_the_end_of_what_they_run_and_nothing_is_lost() -> None:
    scaler = Always({0.0: 1, 50.0: 3, 150.0: 1})
    scaled = run(steady(200, 2), scaler, ReplicaConfig(), Slo(), cold_start_s=30.0, first=1)
    assert scaled.requests == 400
    assert (scaled.changes, scaled.most) == (2, 3)
    assert scaled.replica_hours * 3600 == pytest.approx(200 + 2 * 100, abs=3)
    counts = {look.now: (len(look.ready), len(look.starting)) for look in scaler.looks}
    assert (counts[55.0], counts[75.0], counts[85.0], counts[155.0]) == ((1, 2), (1, 2), (3, 0), (1, 0))


def test_at_constant_load_the_policy_settles() -> None:
    """A load of three replicas, from one: after it has been found, the size changes no more."""
    config, seen = ReplicaConfig(), list[int]()
    scaler = PenstockScaler(Limits(1, 20, down_window_s=120), Settings())
    inner = scaler.size
    scaler.size = lambda look: seen.append(inner(look)) or seen[-1]  # type: ignore[method-assign]
    run(steady(900, 10, prompt=4000), scaler, config, Slo(), cold_start_s=30.0, first=1)
    assert len(set(seen[100:])) == 1, seen
    assert 2 <= seen[-1] <= 5


@pytest.mark.skipif(not AZURE.exists(), reason="the Azure trace is not there")
def test_on_a_real_trace_the_policy_gets_more_for_less_than_hpa() -> None:
    trace, slo = load_azure(AZURE).first(2500), Slo(ttft_s=5.0, itl_s=0.1)
    ours = run(
        trace, PenstockScaler(Limits(1, 40, target_utilization=0.3), Settings()), ReplicaConfig(), slo, cold_start_s=60.0, first=4
    )
    theirs = run(trace, HpaScaler(4.0, 1, 40), SLOW, slo, cold_start_s=60.0, first=4)
    assert ours.requests == theirs.requests == len(trace.requests)
    assert ours.replica_hours < theirs.replica_hours and ours.attained > theirs.attained, (ours, theirs)


def test_traces_are_found_above_a_checkout_that_is_nested(tmp_path: Path) -> None:
    traces = tmp_path / "shared/traces"
    traces.mkdir(parents=True)
    nested = tmp_path / "checkouts/one/sim/tests/test.py"
    assert trace_folder(nested) == traces.resolve()
    assert trace_folder(tmp_path / "main/benchmarks/bench.py") == traces.resolve()


def attained(burst_s: float, warm: int, most: int) -> float:
    """Share of the requests whose first token comes in time, where the load is eightfold for a while: a replica does two requests
    a second and takes 30 s to start."""
    arrivals = _arrivals(600.0, 1.0, (300.0, 300.0 + burst_s), 8.0)
    trace = Trace("burst", 64, [TraceRequest(number, at, 1200, 40, ()) for number, at in enumerate(arrivals)])
    config = ReplicaConfig(time=StepTime(base_s=0.02, prefill_token_s=4e-4, row_s=1e-4, context_token_s=0.0))
    scaler = PenstockScaler(Limits(2, most, warm=warm), Settings())
    return run(trace, scaler, config, Slo(ttft_s=2.0, itl_s=1.0), cold_start_s=30.0, first=2 + warm).attained


@pytest.mark.req("SC-04", "SC-05")
def test_a_burst_is_for_warm_replicas_where_new_ones_come_when_it_is_over() -> None:
    few, reactive, warm = attained(30.0, 0, 2), attained(30.0, 0, 20), attained(30.0, 3, 20)
    assert few < reactive < few + 0.05, "within one cold start nothing is gained"
    assert warm > 0.99
    few, reactive, warm = attained(60.0, 0, 2), attained(60.0, 0, 20), attained(60.0, 3, 20)
    assert few + 0.1 < reactive < 0.8, "within two, its second half"
    assert warm > 0.99


def _arrivals(until: float, rate: float, burst: tuple[float, float], burst_rate: float) -> list[float]:
    """Even ones, more of them in the burst."""
    at, times = 0.0, list[float]()
    while at < until:
        times.append(at)
        at += 1 / (burst_rate if burst[0] <= at < burst[1] else rate)
    return times
