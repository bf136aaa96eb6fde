"""The HorizontalPodAutoscaler controller of the real control plane sizes models: it is left alone, named, and never fought."""

import json
from typing import Any

from e2e import external_metrics, models, scripted_engine
from e2e.cluster.phases import Phases
from e2e.scripted_fleet import OVERLOAD, Fleet, steadily
from e2e.system import System
from e2e.waiting import eventually

Object = dict[str, Any]
EACH = 10  # of the metric, a replica
MOST = 3
POOL: Object = {"name": "cpu", "template": scripted_engine.template()}


def autoscaler(model: str, version: str, kind: str, target: str) -> Object:
    """A HorizontalPodAutoscaler that goes by what the test tells of the model, and does not wait before it shrinks."""
    metric = {"name": external_metrics.METRIC, "selector": {"matchLabels": {"model": model}}}
    external = {"metric": metric, "target": {"type": "AverageValue", "averageValue": str(EACH)}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": f"{model}-by-requests"},
        "spec": {
            "scaleTargetRef": {"apiVersion": version, "kind": kind, "name": target},
            "minReplicas": 1,
            "maxReplicas": MOST,
            "metrics": [{"type": "External", "external": external}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
        },
    }


def expect_active(fleet: Fleet, status: str, reason: str, *words: str) -> None:
    active = fleet.active()
    assert (active["status"], active["reason"]) == (status, reason), active
    assert all(it in active["message"] for it in words), active


def expect_new(fleet: Fleet, old: set[str], count: int) -> None:
    """So many replicas, and none of those."""
    assert not old & {pod["metadata"]["uid"] for pod in fleet.ready(count)}


def test_a_horizontal_pod_autoscaler_sizes_pools_and_models(system: System, namespace: str, phases: Phases) -> None:
    """Its target is the Deployment of a pool that nothing else sizes, or an InferenceModel with `replicas`."""
    cluster = system.cluster
    pool, whole = Fleet(cluster, namespace, "pool"), Fleet(cluster, namespace, "whole")
    resources = (models.small("pool", replicas=None, pools=[POOL]), models.small("whole", replicas=1, pools=[POOL]))
    with external_metrics.served(cluster, namespace) as told, models.applied(cluster, namespace, *resources):
        with phases("two models of scripted engines applied → ready"):
            for fleet in (pool, whole):
                eventually(lambda fleet=fleet: fleet.ready(1), seconds=120)
        told |= dict.fromkeys(("pool", "whole"), EACH * MOST)
        cluster.apply(
            autoscaler("pool", "apps/v1", "Deployment", "pool-cpu"),
            autoscaler("whole", "penstock.dev/v1alpha1", "InferenceModel", "whole"),
            namespace=namespace,
        )
        with phases("requests told → both grown, and it is said by whom"):
            old = {
                fleet: {pod["metadata"]["uid"] for pod in eventually(lambda it=fleet: it.ready(MOST), 120)}
                for fleet in (pool, whole)
            }
            eventually(lambda: expect_active(pool, "False", "OtherAutoscaler", "pool-by-requests", "pool-cpu"), seconds=120)
            eventually(lambda: expect_active(whole, "False", "OtherAutoscaler", "whole-by-requests"), seconds=120)
        assert cluster.get(models.KIND, "whole", namespace)["spec"]["replicas"] == MOST
        with phases("both specs changed → all replicas replaced, as many as before"):
            for fleet in (pool, whole):
                patch = json.dumps({"spec": {"drainTimeout": "31s"}})
                cluster.kubectl("patch", models.KIND, fleet.name, f"--namespace={namespace}", "--type=merge", f"--patch={patch}")
            for fleet in (pool, whole):
                eventually(lambda it=fleet: expect_new(it, old[it], MOST), seconds=120)
        told |= dict.fromkeys(("pool", "whole"), EACH)
        with phases("fewer requests told → both shrunk"):
            for fleet in (pool, whole):
                eventually(lambda it=fleet: it.ready(1), seconds=120)


def test_the_autoscaler_only_tells_where_another_sizes_the_pool(system: System, namespace: str, phases: Phases) -> None:
    cluster, fleet = system.cluster, Fleet(system.cluster, namespace, "both")
    scaled = POOL | {"scaling": {"min": 1, "max": 4, "downWindow": "1s"}}
    resource = models.small("both", replicas=None, pools=[scaled])
    hpa = autoscaler("both", "apps/v1", "Deployment", "both-cpu")

    def would_grow() -> None:
        assert fleet.status["desired"] > 2, fleet.status

    with external_metrics.served(cluster, namespace) as told, models.applied(cluster, namespace, resource):
        with phases("a scaled model applied → ready, and sized by us"):
            eventually(lambda: fleet.ready(1), seconds=120)
            eventually(lambda: expect_active(fleet, "True", "Scaling"), seconds=120)
        told["both"] = 2 * EACH
        cluster.apply(hpa, namespace=namespace)
        with phases("a HorizontalPodAutoscaler for the same → it acts, and the conflict is told"):
            eventually(lambda: fleet.ready(2), seconds=120)
            conflict = ("both-by-requests sizes Deployment both-cpu", "remove the one or the other")
            eventually(lambda: expect_active(fleet, "False", "AutoscalerConflict", *conflict), seconds=120)
        with phases("overload → we would grow, and leave it"):
            fleet.say(OVERLOAD)
            eventually(would_grow, seconds=120)
            steadily(lambda: (fleet.ready(2), None)[1], seconds=6)  # more than one look of either
        with phases("the HorizontalPodAutoscaler deleted → sized by us again"):
            cluster.kubectl("delete", "horizontalpodautoscaler", hpa["metadata"]["name"], f"--namespace={namespace}")
            eventually(lambda: fleet.ready(4), seconds=120)
            eventually(lambda: expect_active(fleet, "True", "Scaling"), seconds=120)
