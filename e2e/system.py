"""Penstock as it is installed: the manifests applied, everything in pods under its own ServiceAccount."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from e2e.cluster.cluster import REPOSITORY, Cluster
from e2e.cluster.phases import Phases
from e2e.traffic import openai_client
from e2e.waiting import eventually
from penstock.api import metrics

NAMESPACE = "penstock-system"
ENVOY, GATEWAY, OPERATOR = "penstock-envoy", "penstock-gateway", "penstock-operator"  # what their objects are called


@dataclass(frozen=True)
class System:
    """An installed system."""

    cluster: Cluster
    url: str
    """Where clients reach the models: Envoy's Service."""

    def openai(self) -> openai.OpenAI:
        """An OpenAI client of the gateway."""
        return openai_client(self.url)

    def pods(self, component: str) -> list[dict[str, Any]]:
        """The pods of one of the system's workloads."""
        kind = "statefulset" if component == GATEWAY else "deployment"
        selector = self.cluster.get(kind, component, NAMESPACE)["spec"]["selector"]["matchLabels"]
        return self.cluster.list("pods", NAMESPACE, ",".join(f"{key}={value}" for key, value in selector.items()))


def install(cluster: Cluster, phases: Phases) -> System:
    """Install Penstock the way the README says, and wait until it is there."""
    with phases("Penstock's manifests applied"):
        # By the server: a CRD is larger than the annotation in which a client would keep what it applied last.
        cluster.kubectl("apply", "--server-side", f"--kustomize={REPOSITORY / 'manifests'}")
        # Engines of some tests are scripts.
        flag = [{"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": "--allow-command-templates"}]
        cluster.kubectl(
            "patch", f"deployment/{OPERATOR}", f"--namespace={NAMESPACE}", "--type=json", f"--patch={json.dumps(flag)}"
        )
    with phases("operator, gateway and Envoy available"):
        everything = ["--for=condition=Available", "deployment", "--all", f"--namespace={NAMESPACE}"]
        cluster.kubectl("wait", *everything, "--timeout=120s", timeout=125)
        cluster.kubectl("rollout", "status", f"statefulset/{GATEWAY}", f"--namespace={NAMESPACE}", "--timeout=120s", timeout=125)
    service = cluster.get("service", ENVOY, NAMESPACE)["spec"]
    (port,) = (port["port"] for port in service["ports"] if port["name"] == "http")
    return System(cluster, f"http://{service['clusterIP']}:{port}")


def acting(address: str) -> bool:
    """Whether the operator whose `/metrics` are there holds the Lease: what it counts is there while it does."""
    try:
        return metrics.RECONCILES in httpx.get(f"http://{address}/metrics", timeout=5).text
    except httpx.TransportError as problem:
        raise AssertionError(f"{address}: {problem!r}") from problem


@contextmanager
def without_operators(system: System) -> Iterator[None]:
    """Its operators are gone meanwhile: the test has one of its own."""
    cluster, there = system.cluster, (f"deployment/{OPERATOR}", f"--namespace={NAMESPACE}")
    replicas = cluster.get("deployment", OPERATOR, NAMESPACE)["spec"]["replicas"]
    cluster.kubectl("scale", *there, "--replicas=0")
    eventually(lambda: _expect_no_operators(system), seconds=120)
    try:
        yield
    finally:
        cluster.kubectl("scale", *there, f"--replicas={replicas}")
        cluster.kubectl("rollout", "status", *there, "--timeout=120s", timeout=125)


def _expect_no_operators(system: System) -> None:
    assert not system.pods(OPERATOR)
