"""What another load would make of a pool."""

import pytest

from penstock.api.load_report import LoadReport
from penstock.operator.autoscale.limits import Limits, ModelLimits, Settings
from penstock.operator.autoscale.policy import PoolView
from penstock.operator.autoscale.signals import PoolSignals, ReplicaSignal
from penstock.operator.autoscale.whatif import outlook, scaled
from penstock.operator.explain import would_change

REPORT = LoadReport(1, 1, num_requests_running=6, max_num_seqs=8, kv_cache_usage_perc=0.1, prefill_backlog_tokens=50)
SIGNALS = PoolSignals(1, tuple(ReplicaSignal(uid, True, False, 6, REPORT, 0.1) for uid in "ab"))
LIMITS = ModelLimits({"p": Limits(1, 8)})


def test_every_figure_of_load_is_scaled_and_no_figure_of_speed() -> None:
    twice = scaled(SIGNALS, 2.0)
    report = twice.replicas[0].report
    assert report is not None and twice.held == 2
    assert (report.num_requests_running, report.kv_cache_usage_perc, report.prefill_backlog_tokens) == (12, 0.2, 100)
    assert report.max_num_seqs == 8


@pytest.mark.parametrize(
    ("load", "size", "constraint"), [(0.25, 1, "Demand"), (1.0, 3, "Demand"), (2.0, 5, "Demand"), (9.0, 8, "Max")]
)
def test_the_policy_itself_says_where_it_settles(load: float, size: int, constraint: str) -> None:
    prospect = outlook({"p": PoolView(2, (), scaled(SIGNALS, load))}, LIMITS, Settings(), {}, 0.0)["p"]
    assert (prospect.settled.replicas, prospect.settled.constraint) == (size, constraint)


def test_nothing_known_settles_where_it_is_and_says_what_is_missing() -> None:
    prospect = outlook({"p": PoolView(2, (), None)}, LIMITS, Settings(), {}, 0.0)["p"]
    assert prospect.settled.replicas == 2
    assert "gateway" in would_change(prospect, 1, 8)
