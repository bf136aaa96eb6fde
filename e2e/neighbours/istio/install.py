"""Istio's control plane in a cluster, from its Go module: the program, the chart's rights and settings, the CRDs.

Its images are replaced: `pilot` by the program that is built here, `proxyv2` by `proxy.py`.
"""

import sys
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from e2e.cluster.build import Program, find_go, programs_folder
from e2e.cluster.cluster import Cluster
from e2e.cluster.commands import run
from e2e.cluster.helm import Helm

FOLDER = Path(__file__).parent / "module"
MODULE = "istio.io/istio"
PROGRAM = "istio-pilot-discovery"
PROGRAMS = {PROGRAM: Program(f"{MODULE}/pilot/cmd/pilot-discovery", FOLDER)}
NAMESPACE = "istio-system"
GATEWAY_CLASS = "istio"
IMAGES = {
    "registry.istio.io/testing/pilot": [programs_folder() / PROGRAM],
    "registry.istio.io/testing/proxyv2": [Path(sys.executable), "-m", "e2e.neighbours.istio.proxy"],
}
_TINY = {"requests": {"cpu": "10m", "memory": "16Mi"}}
VALUES: dict[str, Any] = {
    "autoscaleEnabled": False,
    "resources": _TINY,
    "env": {
        "ENABLE_GATEWAY_API_INFERENCE_EXTENSION": "true",
        # Filters that only Istio's own build of Envoy has.
        "PILOT_ENABLE_ALPN_FILTER": "false",
        "PILOT_ENABLE_METADATA_EXCHANGE": "false",
    },
    "telemetry": {"enabled": False},
    "meshConfig": {"enableAutoMtls": False},  # its certificates come from Istio's agent, which is not there
    "global": {"proxy": {"resources": _TINY}},
    # There is nobody who gives a LoadBalancer its address.
    "gatewayClasses": {GATEWAY_CLASS: {"service": {"spec": {"type": "ClusterIP"}}}},
}
_LEFT_OUT = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration", "ValidatingAdmissionPolicy",
             "ValidatingAdmissionPolicyBinding", "PodDisruptionBudget")  # fmt: skip
"""Sidecars are injected into nothing here, and istiod signs no webhook's certificate."""


def charts(console: Console) -> Path:
    """The folder of its charts, in the module that is built."""
    module = run(*find_go(console), "list", "-C", str(FOLDER), "-m", "-f", "{{.Dir}}", MODULE).strip()
    return Path(module) / "manifests" / "charts"


def install(cluster: Cluster, folder: Path, home: Path) -> None:
    """Installs it, and waits until it runs. The cluster has the Gateway API's and the extension's CRDs, and runs `IMAGES`.

    Args:
        folder: See `charts`.
        home: A folder for Helm.
    """
    cluster.kubectl("apply", "--server-side", f"--filename={folder / 'base/files/crd-all.gen.yaml'}")
    cluster.kubectl("create", "namespace", NAMESPACE)
    chart = folder / "istio-control" / "istio-discovery"
    rendered = Helm(home)("template", "istiod", chart, f"--namespace={NAMESPACE}", values=yaml.safe_dump(VALUES))
    objects = [it for it in yaml.safe_load_all(rendered) if it and it["kind"] not in _LEFT_OUT]
    cluster.kubectl("apply", "--server-side", "--filename=-", stdin=yaml.safe_dump_all(objects))
    cluster.kubectl("rollout", "status", "deployment/istiod", f"--namespace={NAMESPACE}", "--timeout=180s", timeout=185)


def picker_tls(namespace: str, *services: str) -> list[dict[str, Any]]:
    """What Istio needs for pickers that speak TLS with a certificate that nobody vouches for, as its documentation has it."""
    return [
        {
            "apiVersion": "networking.istio.io/v1",
            "kind": "DestinationRule",
            "metadata": {"name": f"{name}-tls", "namespace": namespace},
            "spec": {
                "host": f"{name}.{namespace}.svc.cluster.local",
                "trafficPolicy": {"tls": {"mode": "SIMPLE", "insecureSkipVerify": True}},
            },
        }
        for name in services
    ]
