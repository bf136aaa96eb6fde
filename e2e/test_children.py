"""A model's other objects on the real API server: kinds that come later, names that are taken."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from e2e import models
from e2e.cluster import build, crds
from e2e.cluster.cluster import Cluster
from e2e.cluster.phases import Phases
from e2e.system import System
from e2e.waiting import eventually
from penstock.api import labels

Object = dict[str, Any]


@contextmanager
def installed(cluster: Cluster, *sources: crds.Source) -> Iterator[None]:
    """CRDs of others, meanwhile."""
    files = [f"--filename={crds.place(build.programs_folder(), source)}" for source in sources]
    cluster.kubectl("apply", "--server-side", *files)
    cluster.await_crds(*files)
    try:
        yield
    finally:
        cluster.kubectl("delete", *files)


def test_kinds_that_come_later_and_a_name_that_is_taken(system: System, namespace: str, phases: Phases) -> None:
    cluster, name = system.cluster, "exposed"
    exposure = {"picker": {"name": "penstock-picker"}, "gateway": {"name": "web"}}
    resource = models.small(name, routing={"inferencePool": exposure})
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": f"{name}-cpu"}, "spec": {"ports": [{"port": 1}]}}
    cluster.apply(service, namespace=namespace)
    with models.applied(cluster, namespace, resource):
        with phases("a Service of somebody else in the way → said, and left alone"):
            accepted = eventually(lambda: expect_not_owned(cluster, namespace, name))
        assert f"Service {name}-cpu" in accepted["message"]
        assert cluster.get("service", f"{name}-cpu", namespace)["spec"]["ports"][0]["port"] == 1
        cluster.kubectl("delete", "service", f"{name}-cpu", f"--namespace={namespace}")
        with phases("out of the way → Ready without the CRDs that are missing"):
            models.wait_until_ready(cluster, namespace, name)
        assert models.conditions(cluster, namespace, name)["Routed"]["reason"] == "Routed"
        policy = cluster.get("networkpolicy", f"{name}-cpu", namespace)
        assert policy["spec"]["podSelector"]["matchLabels"] == {labels.MODEL: name, labels.POOL: "cpu"}
        with (
            phases("the CRDs installed → an InferencePool and an HTTPRoute"),
            installed(cluster, crds.INFERENCE_POOLS, crds.HTTP_ROUTES),
        ):
            route = eventually(lambda: cluster.get("httproute", name, namespace), seconds=120)
            assert route["spec"]["rules"][0]["backendRefs"][0]["name"] == name
            pool = eventually(lambda: cluster.get("inferencepool", name, namespace), seconds=120)
            assert pool["spec"]["endpointPickerRef"] == {
                "group": "",
                "kind": "Service",
                "name": "penstock-picker",
                "port": {"number": 9002},
                "failureMode": "FailOpen",
            }
            assert [it["kind"] for it in pool["metadata"]["ownerReferences"]] == ["InferenceModel"]
            cluster.apply(models.small(name), namespace=namespace)
            eventually(lambda: expect_none(cluster, "inferencepools,httproutes", namespace), seconds=120)


def expect_not_owned(cluster: Cluster, namespace: str, name: str) -> Object:
    accepted = models.conditions(cluster, namespace, name)["Accepted"]
    assert accepted["reason"] == "NotOwned"
    return accepted


def expect_none(cluster: Cluster, kinds: str, namespace: str) -> None:
    assert not cluster.list(kinds, namespace)
