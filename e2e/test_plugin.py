"""`kubectl penstock`: kubectl finds the plugin, and it says and does what it promises."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from e2e import models
from e2e.cluster.cluster import Cluster
from e2e.cluster.phases import Phases
from e2e.system import System
from e2e.traffic import Client, answers_of, clients, expect_no_loss
from e2e.waiting import eventually
from penstock.api import labels

NAME, TOKENS, CLIENTS = "seen", 300, 2


def kubectl(cluster: Cluster, *words: str, expected: int = 0) -> str:
    """What kubectl says, with the folder of the plugin in its PATH as after `pip install penstock`."""
    environment = {**os.environ, **cluster.environment, "COLUMNS": "300"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        [cluster.programs / "kubectl", *words], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.req("DR-07")
def test_kubectl_finds_the_plugin_and_a_drained_replica_loses_nothing(system: System, namespace: str, phases: Phases) -> None:
    cluster, here = system.cluster, f"--namespace={namespace}"

    def penstock(*words: str, expected: int = 0) -> str:
        return kubectl(cluster, "penstock", *words, here, expected=expected)

    assert "kubectl-penstock" in kubectl(cluster, "plugin", "list")
    assert "there is no InferenceModel" in penstock("status", expected=1)
    with models.applied(cluster, namespace, models.small(NAME, replicas=2)):
        models.wait_until_ready(cluster, namespace, NAME)
        pods = eventually(lambda: models.ready_pods(cluster, namespace, NAME, 2), seconds=120)
        with phases("kubectl penstock status, events, top"):
            tree = penstock("status", NAME)
            assert f"{namespace}/{NAME}  Serving  2/2 ready" in tree
            assert all(f"{pod['metadata']['name']}  Ready  on {pod['spec']['nodeName']}" in tree for pod in pods.values()), tree
            told = penstock("events", NAME)
            for what in ("Deployment/seen-cpu", "Pod/seen-cpu-", "InferenceModel/seen", "ScalingReplicaSet", "Serving"):
                assert what in told, told
        with clients(system.url, NAME, CLIENTS, TOKENS) as asking:
            victim = eventually(lambda: streaming(asking), seconds=120)
            name = pods[victim]["metadata"]["name"]
            eventually(lambda: expect_in_flight(penstock("top", "--once")), seconds=120)
            with phases("kubectl penstock drain --keep: a replica that answers runs empty"):
                said = penstock("drain", name, "--keep")
            emptied = time.monotonic()
            assert "gets no new requests" in said
            assert said.splitlines()[-1].endswith(": 0 requests in flight")
            assert "cordoned" in next(line for line in penstock("status").splitlines() if name in line)
            (other,) = (pod["metadata"]["name"] for uid, pod in pods.items() if uid != victim)
            assert "only ready replica" in penstock("drain", other, expected=1)
            undone = time.monotonic()
            assert "has requests again" in penstock("drain", name, "--undo")
            assert labels.CORDONED not in cluster.get("pod", name, namespace)["metadata"].get("annotations", {})
            with phases("kubectl penstock drain: replaced"):
                assert penstock("drain", name).splitlines()[-1].endswith("is gone")
            eventually(lambda: expect_replaced(cluster, namespace, victim), seconds=120)
        answers = answers_of(asking)
        expect_no_loss(answers, TOKENS)
        assert any(it.ended > emptied for it in answers), "nobody asked while it was cordoned"
        assert not [it for it in answers if it.replica == victim and emptied < it.started < undone], "it was picked"


def streaming(asking: list[Client]) -> str:
    """A replica that streams to one of them."""
    replicas = [it.replica for it in asking if it.received > 2 and it.replica]
    assert replicas
    return replicas[0]


def expect_in_flight(table: str) -> None:
    """Somebody is answering."""
    rows = [line.split() for line in table.splitlines() if line.startswith(f"  {NAME}-")]
    assert len(rows) == 2, table
    assert sum(int(row[2]) for row in rows) >= 1, table


def expect_replaced(cluster: Cluster, namespace: str, victim: str) -> None:
    assert victim not in models.ready_pods(cluster, namespace, NAME, 2)
