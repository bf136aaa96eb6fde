"""The cluster stays as the resource says: drift is put right, the scale subresource works, and nothing is left in the end."""

import pytest

from e2e import models
from e2e.cluster.cluster import Cluster
from e2e.cluster.commands import CommandError
from e2e.cluster.phases import Phases
from e2e.system import NAMESPACE, OPERATOR, System
from e2e.waiting import eventually
from penstock.api import labels


def expect_pods(cluster: Cluster, namespace: str, name: str, count: int) -> None:
    models.ready_pods(cluster, namespace, name, count)
    assert cluster.get(models.KIND, name, namespace)["status"]["ready"] == f"{count}/{count}"


def test_scale_drift_and_deletion(system: System, namespace: str, phases: Phases) -> None:
    cluster, name = system.cluster, "upkeep"
    there = f"--namespace={namespace}"
    with models.applied(cluster, namespace, models.small(name)):
        with phases("a model of one replica applied → Ready"):
            models.wait_until_ready(cluster, namespace, name)
            eventually(lambda: expect_pods(cluster, namespace, name, 1))
        with phases("kubectl scale → two replicas ready"):
            cluster.kubectl("scale", f"{models.KIND}/{name}", "--replicas=2", there)
            eventually(lambda: expect_pods(cluster, namespace, name, 2), seconds=120)
        columns = cluster.kubectl("get", models.KIND, name, there).splitlines()[1].split()
        assert columns[:4] == [name, name, "2/2", "2"]

        (workload,) = cluster.list("deployments", namespace, f"{labels.MODEL}={name}")
        with phases("its Deployment deleted → back and ready"):
            cluster.kubectl("delete", "deployment", workload["metadata"]["name"], there)
            eventually(lambda: expect_another(cluster, namespace, workload), seconds=120)
            eventually(lambda: expect_pods(cluster, namespace, name, 2), seconds=120)
        (service,) = cluster.list("services", namespace, f"{labels.MODEL}={name}")
        with phases("its Service bent → straight again"):
            bend = '{"spec": {"publishNotReadyAddresses": true, "selector": {"penstock.dev/model": "another"}}}'
            cluster.kubectl("patch", "service", service["metadata"]["name"], there, f"--patch={bend}")
            eventually(lambda: expect_selector(cluster, service), seconds=120)

        kinds = {item["kind"] for item in models.belongings(cluster, namespace, name)}
        assert kinds == models.KINDS
        with phases("the model deleted, nothing left"):
            cluster.kubectl("delete", models.KIND, name, there)
            eventually(lambda: models.expect_gone(cluster, namespace, name), seconds=120)


def expect_another(cluster: Cluster, namespace: str, workload: models.Object) -> None:
    new = cluster.get("deployment", workload["metadata"]["name"], namespace)
    assert new["metadata"]["uid"] != workload["metadata"]["uid"]


def expect_selector(cluster: Cluster, service: models.Object) -> None:
    metadata = service["metadata"]
    assert cluster.get("service", metadata["name"], metadata["namespace"])["spec"]["selector"] == service["spec"]["selector"]


def test_scale_of_a_pool_without_replicas_is_left_to_others(system: System, namespace: str) -> None:
    cluster, name = system.cluster, "hands-off"
    with models.applied(cluster, namespace, models.small(name, replicas=None)):
        models.wait_until_ready(cluster, namespace, name)
        (workload,) = cluster.list("deployments", namespace, f"{labels.MODEL}={name}")
        cluster.kubectl("scale", "deployment", workload["metadata"]["name"], "--replicas=2", f"--namespace={namespace}")
        eventually(lambda: expect_pods(cluster, namespace, name, 2), seconds=120)
        # A change of the spec makes the operator apply the Deployment anew: that must not reset its scale.
        patch = '{"spec": {"drainTimeout": "31s"}}'
        cluster.kubectl("patch", models.KIND, name, f"--namespace={namespace}", "--type=merge", f"--patch={patch}")
        eventually(lambda: expect_rolled_out(cluster, namespace, name, workload), seconds=120)
        expect_pods(cluster, namespace, name, 2)


def expect_rolled_out(cluster: Cluster, namespace: str, name: str, before: models.Object) -> None:
    after = cluster.get("deployment", before["metadata"]["name"], namespace)
    old, new = (it["spec"]["template"]["metadata"]["labels"][labels.REVISION] for it in (before, after))
    assert new != old
    for pod in models.ready_pods(cluster, namespace, name, 2).values():
        assert pod["metadata"]["labels"][labels.REVISION] == new


@pytest.mark.req("XC-07")
def test_standby_operator_takes_over(system: System, namespace: str, phases: Phases) -> None:
    cluster, name = system.cluster, "orphan"
    leader = lease_holder(cluster)
    (pod,) = (pod for pod in system.pods(OPERATOR) if leader.startswith(pod["metadata"]["name"]))
    # With force, so that the Lease is not given back: it has to run out.
    force = ["--grace-period=0", "--force", f"--namespace={NAMESPACE}"]
    cluster.kubectl("delete", "pod", pod["metadata"]["name"], *force)
    with (
        phases("the leading operator killed → the other one judges a new model"),
        models.applied(cluster, namespace, models.small(name, engine={"connector": {"type": "nixl"}})),
    ):
        accepted = eventually(lambda: models.conditions(cluster, namespace, name)["Accepted"], seconds=120)
    assert "spec.engine.connector" in accepted["message"]
    assert lease_holder(cluster) not in ("", leader)


def lease_holder(cluster: Cluster) -> str:
    return cluster.get("lease", OPERATOR, NAMESPACE)["spec"]["holderIdentity"]


def test_operator_has_the_rights_it_needs_and_no_more(system: System) -> None:
    def may(verb: str, kind: str) -> bool:
        account = f"--as=system:serviceaccount:{NAMESPACE}:{OPERATOR}"
        try:
            system.cluster.kubectl("auth", "can-i", verb, kind, account, "--all-namespaces")
        except CommandError as refusal:
            assert str(refusal).endswith(": no"), refusal
            return False
        return True

    assert may("patch", "deployments.apps")
    beyond = ("get secrets", "create pods", "create pods/exec", "create roles", "bind roles", "update pods/ephemeralcontainers")
    assert not [right for right in beyond if may(*right.split())]
