"""Penstock as it is installed: the manifests applied, everything in pods under its own ServiceAccount."""

from dataclasses import dataclass
from typing import Any

import openai

from e2e.cluster.cluster import REPOSITORY, Cluster
from e2e.cluster.phases import Phases
from e2e.traffic import openai_client

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
        """The pods of one of the system's Deployments."""
        selector = self.cluster.get("deployment", component, NAMESPACE)["spec"]["selector"]["matchLabels"]
        return self.cluster.list("pods", NAMESPACE, ",".join(f"{key}={value}" for key, value in selector.items()))


def install(cluster: Cluster, phases: Phases) -> System:
    """Install Penstock the way the README says, and wait until it is there."""
    with phases("Penstock's manifests applied"):
        # By the server: a CRD is larger than the annotation in which a client would keep what it applied last.
        cluster.kubectl("apply", "--server-side", f"--kustomize={REPOSITORY / 'manifests'}")
    with phases("operator, gateway and Envoy available"):
        everything = ["--for=condition=Available", "deployment", "--all", f"--namespace={NAMESPACE}"]
        cluster.kubectl("wait", *everything, "--timeout=60s", timeout=65)
    service = cluster.get("service", ENVOY, NAMESPACE)["spec"]
    (port,) = (port["port"] for port in service["ports"] if port["name"] == "http")
    return System(cluster, f"http://{service['clusterIP']}:{port}")
