"""The autoscaler's hands on Kubernetes."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.operator.apply import Applier
from penstock.operator.autoscale.policy import Decision
from penstock.operator.scaling import KubernetesActuator
from penstock.operator.store import Children, Key, Resources

ID = "default/tiny/main"
SCALING = {"min": 0, "max": 4, "warm": 1, "scaleToZeroAfter": "10m", "mode": "DryRun"}


@pytest.fixture
def changed() -> list[Key]:
    return []


@pytest.fixture
def actuator(api: Any, make: Any, changed: list[Key]) -> KubernetesActuator:
    resources, children = Resources(), Children(lambda key: None)
    api.children = children
    resources.put(make.resource(pools=[{"name": "main", "scaling": SCALING}]))
    resources.put(make.resource("fixed"))
    for model in ("tiny", "fixed"):
        meta = {
            "name": f"{model}-main",
            "namespace": "default",
            "labels": {"penstock.dev/model": model, "penstock.dev/pool": "main"},
        }
        api.put({"kind": "Deployment", "metadata": meta, "spec": {"replicas": 2}})
    api.put(make.ready_pod("a"))
    api.put(make.ready_pod("b"))
    api.put(make.pod("c"))
    return KubernetesActuator(
        api=api,
        resources=resources,
        observed=children,
        scale=Applier(api, children).scale,
        changed=changed.append,
        registry=CollectorRegistry(),
    )


async def test_only_pools_with_scaling_are_offered_with_what_the_spec_says(actuator: KubernetesActuator) -> None:
    (pool,) = await actuator.pools()
    assert (pool.pool_id, pool.replicas, pool.dry_run, len(pool.pending_ages_s)) == (ID, 2, True, 1)
    assert (pool.limits.min_replicas, pool.limits.max_replicas, pool.limits.warm) == (0, 4, 1)
    assert pool.limits.scale_to_zero_after_s == 600


@pytest.mark.req("DR-12")
async def test_victims_are_cordoned_and_cheapest_and_pardoned_when_the_pool_grows(actuator: Any, api: Any) -> None:
    await actuator.scale(ID, 1, ["uid-b"])
    marks = {name: api.objects["Pod", "default", name]["metadata"].get("annotations", {}) for name in "abc"}
    assert marks["b"]["penstock.dev/cordoned"] == "true"
    assert int(marks["b"]["controller.kubernetes.io/pod-deletion-cost"]) < 0
    assert marks["a"] == marks["c"] == {}
    assert api.objects["Deployment", "default", "tiny-main"]["spec"]["replicas"] == 1
    order = [kind for _, kind, _ in api.calls]
    assert order.index("Pod") < order.index("Deployment"), "nobody may be picked who is about to go"
    await actuator.scale(ID, 3, [])
    assert api.objects["Pod", "default", "b"]["metadata"]["annotations"] == {}


async def test_decisions_are_told_once(actuator: Any, api: Any, changed: list[Key]) -> None:
    assert actuator.report(ID) is None
    await actuator.record(ID, 2, Decision(3, "Demand", "3 are needed", {}), acted=True, dry_run=False)
    await actuator.record(ID, 3, Decision(3, "DownWindow", "was 3 lately", {}), acted=False, dry_run=False)
    await actuator.record(ID, 3, Decision(3, "DownWindow", "was 3 a moment ago", {}), acted=False, dry_run=False)
    report = actuator.report(ID)
    assert (report.current, report.desired, report.constraint, report.reason) == (3, 3, "DownWindow", "was 3 lately")
    assert len(report.decisions) == 1
    assert "2 to 3 (Demand): 3 are needed" in report.decisions[0]
    assert len(changed) == 2
    assert [event["message"] for event in api.events] == ["pool main: 2 to 3 replicas: 3 are needed"]
    await actuator.record(ID, 3, Decision(3, "NoData", "no gateway answered", {}), acted=False, dry_run=False)
    assert actuator.report(ID).active is False
    await actuator.record(ID, 3, Decision(4, "Demand", "4 are needed", {}), acted=False, dry_run=True)
    assert actuator.report(ID).active is False, "a dry run acts on nothing"
