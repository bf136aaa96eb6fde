"""The pool's Deployment."""

import math
from typing import Final, Literal

from penstock.api.resources import InferenceModel, Pool, Rollout, seconds
from penstock.operator.desired.names import selector, workload_metadata
from penstock.operator.desired.size import size
from penstock.operator.objects import Object

Pace = Literal["Surge", "Replace"]
"""While a revision is rolled out: more replicas where the spec allows it, or fewer, since there is no room for more."""

MIN_READY_S: Final = 5
"""A new replica that dies on its first requests must not have replaced an old one by then."""


def limits(rollout: Rollout, pace: Pace) -> Object:
    """Return the limits of a rolling update."""
    if pace == "Surge":
        return {"maxUnavailable": rollout.max_unavailable, "maxSurge": rollout.max_surge}
    return {"maxUnavailable": rollout.max_unavailable or 1, "maxSurge": 0}


def deployment(model: InferenceModel, pool: Pool, template: Object, pace: Pace = "Surge", extra: int = 0) -> Object:
    """The pool's workload. With `Surge`, a new revision's replica must be ready before an old one goes.

    Args:
        template: The pod template.
        extra: Replicas beyond the pool's size, for those whose node is drained.
    """
    rollout = model.spec.rollout
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": workload_metadata(model, pool),
        "spec": {
            "replicas": size(model, pool).initial + extra,
            "selector": {"matchLabels": selector(model, pool)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": limits(rollout, pace)},
            "minReadySeconds": MIN_READY_S,
            "progressDeadlineSeconds": math.ceil(seconds(rollout.progress_deadline)),
            "revisionHistoryLimit": 2,
            "paused": rollout.paused,
            "template": template,
        },
    }
