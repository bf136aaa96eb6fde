"""What a spec asks of the policy."""

from typing import Any

from penstock.api.resources import InferenceModel
from penstock.operator.autoscale.limits import Limits
from penstock.operator.autoscale.spec import limits


def asked(make: Any, **scaling: Any) -> Limits:
    model: InferenceModel = make.model(pools=[{"name": "main", "scaling": {"max": 9, **scaling}}])
    return limits(model.spec.pools[0])


def test_targets_growth_and_cold_start_are_as_the_spec_says_or_as_ever(make: Any) -> None:
    assert asked(make) == Limits(1, 9)
    own = asked(
        make,
        targets={"utilizationPercent": 60, "kvUsagePercent": 90},
        growth={"percent": 50, "replicas": 2, "period": "1m"},
        coldStart="5m",
    )
    assert own == Limits(
        1,
        9,
        target_utilization=0.6,
        target_kv_usage=0.9,
        max_up_factor=1.5,
        max_up_step=2,
        up_period_s=60,
        cold_start_s=300,
    )
