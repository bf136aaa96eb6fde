"""A tenant who may edit one namespace and nothing else: what it gets, and what it does not get by asking a model for it."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from e2e import models
from e2e.cluster.cluster import Cluster
from e2e.cluster.commands import CommandError
from e2e.system import System
from e2e.waiting import eventually

TENANT = "tenant"


@pytest.fixture
def others(system: System, namespace: str) -> Iterator[str]:
    """A namespace of somebody else, with a Secret and a model without replicas that is served as `prized`."""
    cluster, name = system.cluster, f"{namespace}-others"
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("create", "secret", "generic", "credentials", "--from-literal=HF_TOKEN=x", f"--namespace={name}")
    cluster.apply(models.small("prized", replicas=0), namespace=name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def tenant(system: System, namespace: str) -> Path:
    """The kubeconfig of a ServiceAccount that is bound to Kubernetes' own role `edit`, in its namespace alone."""
    cluster = system.cluster
    cluster.kubectl("create", "serviceaccount", TENANT, f"--namespace={namespace}")
    bound = ("--clusterrole=edit", f"--serviceaccount={namespace}:{TENANT}", f"--namespace={namespace}")
    cluster.kubectl("create", "rolebinding", TENANT, *bound)
    kubeconfig = cluster.service_account_kubeconfig(namespace, TENANT)
    eventually(lambda: cluster.kubectl("get", models.KIND, f"--namespace={namespace}", kubeconfig=kubeconfig))
    return kubeconfig


def refused(cluster: Cluster, kubeconfig: Path, *words: str, stdin: str | None = None) -> str:
    """What the API server says when it refuses that command of the tenant's."""
    with pytest.raises(CommandError) as refusal:
        cluster.kubectl(*words, stdin=stdin, kubeconfig=kubeconfig)
    return str(refusal.value)


def test_a_tenant_gets_models_and_nothing_by_way_of_them(system: System, namespace: str, others: str, tenant: Path) -> None:
    cluster, here, there = system.cluster, f"--namespace={namespace}", f"--namespace={others}"

    def apply(resource: models.Object, **template: object) -> None:
        if template:
            resource["spec"]["pools"][0]["template"] = {"spec": template}
        cluster.kubectl("apply", here, "--filename=-", stdin=yaml.safe_dump(resource), kubeconfig=tenant)

    # Other namespaces are closed, and so is the status of its own models.
    apply(models.small("mine", replicas=0))
    for words in (("get", "secrets", there), ("get", models.KIND, there), ("delete", models.KIND, "prized", there)):
        assert "Forbidden" in refused(cluster, tenant, *words)
    lie = '--patch={"status": {"readyReplicas": 9}}'
    assert "Forbidden" in refused(
        cluster, tenant, "patch", models.KIND, "mine", here, "--subresource=status", "--type=merge", lie
    )
    elsewhere = models.small("secretive", source={"uri": "hf://a/b", "secretRef": {"name": "credentials", "namespace": others}})
    said = refused(cluster, tenant, "apply", here, "--filename=-", stdin=yaml.safe_dump(elsewhere))
    assert 'unknown field "spec.source.secretRef.namespace"' in said

    # What a pod may do to its node is not to be had by a template, nor another's rights, nor another's name.
    time.sleep(1.1)  # creation times are whole seconds: the name belongs to who is older
    apply(models.small("node"), volumes=[{"name": "host", "hostPath": {"path": "/"}}], hostNetwork=True)
    apply(models.small("rights"), serviceAccountName="default", automountServiceAccountToken=True)
    apply(models.small("hijack", replicas=0, served={"name": "prized"}))

    def judged(name: str, kind: str, *words: str) -> None:
        condition = models.conditions(cluster, namespace, name)[kind]
        assert condition["status"] == "False", condition
        assert [word for word in words if word not in condition["message"]] == [], condition

    eventually(lambda: judged("node", "Accepted", "template.spec.volumes[host].hostPath", "template.spec.hostNetwork"))
    eventually(lambda: judged("rights", "Accepted", "serviceAccountName", "automountServiceAccountToken"))
    eventually(lambda: judged("hijack", "Routed", "'prized' is served by", f"{others}/prized"))
    for name in ("node", "rights"):
        assert [it["kind"] for it in models.belongings(cluster, namespace, name)] == ["InferenceModel"]

    def still_routed() -> None:
        assert models.conditions(cluster, others, "prized")["Routed"]["status"] == "True"

    eventually(still_routed)  # Unknown while no gateway has answered
    cluster.kubectl("delete", models.KIND, "--all", here, kubeconfig=tenant)
