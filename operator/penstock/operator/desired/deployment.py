"""The pool's Deployment."""

import math
from typing import Any, Final, Literal

from penstock.api.resources import InferenceModel, Pool, seconds
from penstock.operator.desired.names import metadata, selector
from penstock.operator.desired.size import size

Object = dict[str, Any]
Pace = Literal["Surge", "OneAtATime"]
"""One replica more while a revision is rolled out, or one fewer."""

MIN_READY_S: Final = 5
"""A new replica that dies on its first requests must not have replaced an old one by then."""
LIMITS: Final = {
    "Surge": {"maxUnavailable": 0, "maxSurge": 1},
    "OneAtATime": {"maxUnavailable": 1, "maxSurge": 0},
}
"""Of a rolling update, by pace."""


def deployment(model: InferenceModel, pool: Pool, template: Object, pace: Pace = "Surge") -> Object:
    """The pool's workload. With `Surge`, a new revision's replica must be ready before an old one goes.

    Args:
        template: The pod template.
    """
    rollout = model.spec.rollout
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(model, pool),
        "spec": {
            "replicas": size(model, pool).initial,
            "selector": {"matchLabels": selector(model, pool)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": LIMITS[pace]},
            "minReadySeconds": MIN_READY_S,
            "progressDeadlineSeconds": math.ceil(seconds(rollout.progress_deadline)),
            "revisionHistoryLimit": 2,
            "paused": rollout.paused,
            "template": template,
        },
    }
