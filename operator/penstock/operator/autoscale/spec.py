"""The policy's limits, as an InferenceModel states them."""

from penstock.api.resources import InferenceModel, Pool, Slo, seconds
from penstock.operator.autoscale import schedule
from penstock.operator.autoscale.limits import Goals, Hint, Limits, ModelLimits


def model_limits(model: InferenceModel) -> ModelLimits:
    """What the user asks of the autoscaler, for the pools that it sizes.

    Raises:
        ScheduleError: a hint cannot be read.
    """
    shared = model.spec.scaling
    ratio = shared.prefill_per_decode if shared else None
    return ModelLimits(
        pools={pool.name: limits(pool) for pool in model.spec.pools if pool.scaling is not None},
        budget=shared.budget if shared else None,
        prefill_per_decode=(ratio.min_percent / 100, ratio.max_percent / 100) if ratio else None,
    )


def limits(pool: Pool) -> Limits:
    """What the user asks for one pool, which has `scaling`.

    Raises:
        ScheduleError: a hint cannot be read.
    """
    scaling = pool.scaling
    assert scaling is not None
    hints = tuple(Hint(hint.start, hint.time_zone, seconds(hint.duration), hint.min) for hint in scaling.schedule)
    for hint in hints:
        schedule.check(hint)
    return Limits(
        min_replicas=scaling.min,
        max_replicas=scaling.max,
        warm=scaling.warm or 0,
        scale_to_zero_after_s=seconds(scaling.scale_to_zero_after) if scaling.scale_to_zero_after else None,
        down_window_s=seconds(scaling.down_window),
        role=pool.role,
        cost=float(pool.cost),
        target_utilization=scaling.targets.utilization_percent / 100,
        target_kv_usage=scaling.targets.kv_usage_percent / 100,
        max_up_factor=1 + scaling.growth.percent / 100,
        max_up_step=scaling.growth.replicas,
        up_period_s=seconds(scaling.growth.period),
        cold_start_s=seconds(scaling.cold_start),
        goals=_goals(scaling.slo) if scaling.slo else None,
        schedule=hints,
    )


def _goals(slo: Slo) -> Goals:
    return Goals(seconds(slo.ttft) if slo.ttft else None, seconds(slo.itl) if slo.itl else None, slo.percentile / 100)
