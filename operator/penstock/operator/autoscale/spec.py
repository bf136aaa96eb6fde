"""The policy's limits, as an InferenceModel states them."""

from penstock.api.resources import Scaling, seconds
from penstock.operator.autoscale.policy import Limits


def limits(scaling: Scaling) -> Limits:
    """What the user asks of the autoscaler."""
    return Limits(
        min_replicas=scaling.min,
        max_replicas=scaling.max,
        warm=scaling.warm or 0,
        scale_to_zero_after_s=seconds(scaling.scale_to_zero_after) if scaling.scale_to_zero_after else None,
        down_window_s=seconds(scaling.down_window),
    )
