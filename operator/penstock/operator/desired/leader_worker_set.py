"""A pool whose replicas span nodes: a LeaderWorkerSet, in which a group of pods is one replica."""

from typing import Final

from penstock.api import labels
from penstock.api.resources import InferenceModel, Pool
from penstock.operator.desired.deployment import Pace, limits
from penstock.operator.desired.devices import nodes
from penstock.operator.desired.names import child_name, workload_metadata
from penstock.operator.desired.size import size
from penstock.operator.objects import Object

PAUSED: Final = 1000
"""Groups below this ordinal keep their revision: as many as there can be."""
_NONE_UNAVAILABLE: Final = "1%"
"""LWS rounds this down to 0 below a hundred groups. A plain 0 it hands on to a StatefulSet, which may refuse it."""
HEADLESS: Final = "--headless"
_OWN: Final = (labels.MODEL, labels.POOL, labels.ROLE)
_PROBES: Final = ("startupProbe", "readinessProbe", "livenessProbe", "ports")


def leader_worker_set(model: InferenceModel, pool: Pool, template: Object, pace: Pace = "Surge") -> Object:
    """The pool's workload. The leader answers for its group: it alone has the labels by which replicas are found, and the probes.
    A group whose pod restarts is made anew as a whole, since the others' memory of it is gone.

    Args:
        template: The pod template of the leader.
    """
    group = {
        "size": nodes(pool),
        "restartPolicy": "RecreateGroupOnPodRestart",
        "leaderTemplate": template,
        "workerTemplate": _worker(model, pool, template),
    }
    # While nothing moves, LWS would start the surge all the same, of the old revision.
    paused = model.spec.rollout.paused
    rolling = limits(model.spec.rollout, "Replace" if paused else pace)
    rolling["maxUnavailable"] = rolling["maxUnavailable"] or _NONE_UNAVAILABLE
    if paused:
        rolling["partition"] = PAUSED
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": workload_metadata(model, pool),
        "spec": {
            "replicas": size(model, pool).initial,
            "startupPolicy": "LeaderCreated",
            "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": rolling},
            # A Service for each group, in which the leader has a name before it is ready: so that workers find it. A Service for
            # all groups would be called as ours is, in which only ready leaders have names.
            "networkConfig": {"subdomainPolicy": "UniquePerReplica"},
            "leaderWorkerTemplate": group,
        },
    }


def _worker(model: InferenceModel, pool: Pool, template: Object) -> Object:
    """The leader's template for the pods that run ranks alone. The engine finds its place among them in what LWS sets."""
    kept = {name: value for name, value in template["metadata"]["labels"].items() if name not in _OWN}
    own = {**kept, labels.WORKER_OF: child_name(model.metadata.name, pool.name)}
    containers = [_headless(it) if it["name"] == "engine" else it for it in template["spec"]["containers"]]
    return {"metadata": {**template["metadata"], "labels": own}, "spec": {**template["spec"], "containers": containers}}


def _headless(engine: Object) -> Object:
    """The engine's container without HTTP. A command that the pool's template names is its own, with its own arguments."""
    kept = {name: value for name, value in engine.items() if name not in _PROBES}
    return {**kept, "args": [*engine.get("args", []), HEADLESS]}
