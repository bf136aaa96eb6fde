"""Rollouts: an upgrade of the operator restarts nothing, a change goes as fast as there is room, and it can be taken back."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e import models
from e2e.cluster.cluster import Cluster
from e2e.cluster.phases import Phases
from e2e.conftest import Write
from e2e.system import NAMESPACE, OPERATOR, System
from e2e.traffic import answers_of, clients, expect_no_loss
from e2e.waiting import eventually
from penstock.api import labels
from penstock.operator.desired import TEMPLATE_VERSION

Object = dict[str, Any]

TOKENS = 200

# An operator of a version to come: its templates are different, and have the next number.
NEWER = """
import sys
from penstock.operator.cli import operator
from penstock.operator.desired import pod
from penstock.operator.rollout import plan
old = pod._environment
pod._environment = lambda model: [*old(model), {"name": "NEWER", "value": "true"}]
plan.TEMPLATE_VERSION += 1
sys.exit(operator(sys.argv[1:]))
"""


def penstock_rollout(cluster: Cluster, namespace: str, command: str, name: str, *more: str) -> str:
    """The command, as a person would run it on this machine."""
    words = [command, name, "--namespace", namespace, "--kubeconfig", str(cluster.kubeconfig), *more]
    done = subprocess.run(
        [Path(sys.executable).with_name("penstock"), "rollout", *words], capture_output=True, text=True, timeout=125
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def newer_operator(cluster: Cluster) -> Iterator[None]:
    """The operator replaced by a newer one with another default image."""
    container = {"name": "operator", "command": ["python", "-c", NEWER], "env": [{"name": "UPGRADED", "value": "true"}]}
    patch = {"spec": {"template": {"spec": {"containers": [container]}}}}
    there = [f"deployment/{OPERATOR}", f"--namespace={NAMESPACE}"]
    cluster.kubectl("patch", *there, f"--patch={json.dumps(patch)}")
    image = [{"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": "--engine-image=penstock/engine:newer"}]
    cluster.kubectl("patch", *there, "--type=json", f"--patch={json.dumps(image)}")
    try:
        cluster.kubectl("rollout", "status", *there, "--timeout=120s", timeout=125)
        yield
    finally:
        original = [{"op": "replace", "path": "/spec/template/spec/containers/0/command", "value": ["penstock", "operator"]}]
        cluster.kubectl("patch", *there, "--type=json", f"--patch={json.dumps(original)}")
        cluster.kubectl("rollout", "status", *there, "--timeout=120s", timeout=125)


@pytest.mark.req("XC-04")
def test_an_upgrade_of_the_operator_restarts_nothing(system: System, namespace: str, phases: Phases) -> None:
    cluster, names = system.cluster, ["first", "second"]
    with models.applied(cluster, namespace, *(models.small(name) for name in names)):
        for name in names:
            models.wait_until_ready(cluster, namespace, name)
        before = {name: set(models.pods(cluster, namespace, name)) for name in names}
        with phases("the operator upgraded → a new one judges"), newer_operator(cluster):
            for name in names:
                patch = ["--subresource=status", "--type=json", '--patch=[{"op": "remove", "path": "/status"}]']
                cluster.kubectl("patch", models.KIND, name, f"--namespace={namespace}", *patch)
                cluster.kubectl("patch", models.KIND, name, f"--namespace={namespace}", "--type=merge", f"--patch={ROUTING}")
            for name in names:
                models.wait_until_ready(cluster, namespace, name)
                eventually(lambda name=name: models.conditions(cluster, namespace, name))
                assert set(models.ready_pods(cluster, namespace, name, 1)) == before[name]
                assert cluster.get(models.KIND, name, namespace)["status"]["templateVersion"] == TEMPLATE_VERSION
            with phases("a restart → the newer templates; an undo of a change → the older ones"):
                penstock_rollout(cluster, namespace, "restart", names[0])
                penstock_rollout(cluster, namespace, "status", names[0], "--timeout", "120")
                (pod,) = eventually(lambda: models.ready_pods(cluster, namespace, names[0], 1), seconds=120).values()
                assert pod["metadata"]["uid"] not in before[names[0]]
                (engine,) = pod["spec"]["containers"]
                assert {"name": "NEWER", "value": "true"} in engine["env"]
                assert engine["image"] == "penstock/engine:newer"
                assert cluster.get(models.KIND, names[0], namespace)["status"]["templateVersion"] == TEMPLATE_VERSION + 1
            history = penstock_rollout(cluster, namespace, "history", names[0]).splitlines()
            assert [line.split()[0] for line in history] == ["REVISION", "1", "2"]
        (other,) = models.ready_pods(cluster, namespace, names[1], 1)
        assert {other} == before[names[1]]


ROUTING = json.dumps({"spec": {"routing": {"policy": "LeastRequest"}}})


def with_devices(name: str, **spec: Any) -> Object:
    """A model whose replica takes all GPUs that there are."""
    engine = {"name": "engine", "resources": {"limits": {"nvidia.com/gpu": "8"}}}
    return models.small(name, pools=[{"name": "gpu", "template": {"spec": {"containers": [engine]}}}], **spec)


def test_a_rollout_without_room_says_so_and_then_goes_as_it_may(system: System, namespace: str, phases: Phases) -> None:
    cluster, name = system.cluster, "crowded"
    with models.applied(cluster, namespace, with_devices(name)):
        models.wait_until_ready(cluster, namespace, name)
        (before,) = models.ready_pods(cluster, namespace, name, 1)
        with phases("a change without a free device → RolloutBlocked"):
            cluster.apply(with_devices(name, drainTimeout="29s"), namespace=namespace)
            found = eventually(lambda: expect_blocked(cluster, namespace, name), seconds=120)
        assert "Insufficient nvidia.com/gpu" in found["Progressing"]["message"]
        assert found["Ready"]["reason"] == "RolloutBlocked"
        assert found["Serving"]["status"] == "True"
        assert before in models.pods(cluster, namespace, name)
        with pytest.raises(AssertionError, match="does not get any further"):
            penstock_rollout(cluster, namespace, "status", name)
        with phases("downtime allowed → Ready"):
            cluster.apply(with_devices(name, drainTimeout="29s", rollout={"allowDowntime": True}), namespace=namespace)
            penstock_rollout(cluster, namespace, "status", name, "--timeout", "120")
            after = eventually(lambda: models.ready_pods(cluster, namespace, name, 1), seconds=120)
        assert before not in after


def expect_blocked(cluster: Cluster, namespace: str, name: str) -> dict[str, Object]:
    found = models.conditions(cluster, namespace, name)
    assert found["Progressing"]["reason"] == "RolloutBlocked", found["Progressing"]
    return found


@pytest.mark.req("DR-07")
def test_a_renamed_pool_serves_until_its_successor_does(system: System, namespace: str, phases: Phases, report: Write) -> None:
    cluster, name = system.cluster, "renamed"
    with models.applied(cluster, namespace, models.small(name)):
        models.wait_until_ready(cluster, namespace, name)
        with clients(system.url, name, 2, TOKENS) as asking, phases("a pool renamed under load → the other one alone, Ready"):
            cluster.apply(models.small(name, pools=[{"name": "other"}]), namespace=namespace)
            eventually(lambda: expect_only(cluster, namespace, name, "other"), seconds=120)
            models.wait_until_ready(cluster, namespace, name)
    answers = answers_of(asking)
    report(f"         {len(answers)} requests, {len([it for it in answers if not it.complete])} lost: a pool renamed")
    expect_no_loss(answers, TOKENS)


def expect_only(cluster: Cluster, namespace: str, name: str, pool: str) -> None:
    """All that is there for the model is that pool's, and it serves."""
    (pod,) = models.ready_pods(cluster, namespace, name, 1).values()
    assert pod["metadata"]["labels"][labels.POOL] == pool
    found = cluster.list("deployments,services,networkpolicies", namespace, f"{labels.MODEL}={name}")
    assert {it["metadata"]["name"] for it in found} == {f"{name}-{pool}"}
    assert cluster.get(models.KIND, name, namespace)["status"]["ready"] == "1/1"


def test_an_undo_brings_the_old_replicas_back(system: System, namespace: str, phases: Phases) -> None:
    cluster, name = system.cluster, "undone"
    with models.applied(cluster, namespace, models.small(name)):
        models.wait_until_ready(cluster, namespace, name)
        (before,) = models.ready_pods(cluster, namespace, name, 1).values()
        with phases("a model that is not there → the old replica serves; undone → Ready"):
            patch = json.dumps({"spec": {"source": {"uri": "file:///nowhere"}, "engine": {"limits": {"maxNumSeqs": 3}}}})
            cluster.kubectl("patch", models.KIND, name, f"--namespace={namespace}", "--type=merge", f"--patch={patch}")
            eventually(lambda: expect_failing(cluster, namespace, name), seconds=120)
            penstock_rollout(cluster, namespace, "undo", name)
            penstock_rollout(cluster, namespace, "status", name, "--timeout", "120")
        assert list(eventually(lambda: models.ready_pods(cluster, namespace, name, 1))) == [before["metadata"]["uid"]]
        spec = cluster.get(models.KIND, name, namespace)["spec"]
        assert spec["source"]["uri"] == models.small(name)["spec"]["source"]["uri"]
        assert "limits" not in spec.get("engine", {})
        assert cluster.get(models.KIND, name, namespace)["status"]["revision"] == 3
        label = before["metadata"]["labels"][labels.REVISION]
        assert penstock_rollout(cluster, namespace, "history", name).splitlines()[-1].split()[-1] == label


def expect_failing(cluster: Cluster, namespace: str, name: str) -> None:
    found = models.conditions(cluster, namespace, name)
    assert found["Ready"]["reason"] == "NewRevisionFails", found["Ready"]
    assert "/nowhere" in found["Ready"]["message"]
    assert found["Serving"]["status"] == "True"
