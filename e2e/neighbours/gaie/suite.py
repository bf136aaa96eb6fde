"""The Gateway API Inference Extension's conformance tests of gateways, run in a pod as its own CI runs them."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from e2e.cluster.build import Program, programs_folder
from e2e.cluster.cluster import Cluster
from e2e.waiting import eventually

FOLDER = Path(__file__).parent / "module"
PROGRAMS = {
    "gaie-conformance": Program("sigs.k8s.io/gateway-api-inference-extension/conformance", FOLDER, tests=True),
    "echo-basic": Program("sigs.k8s.io/gateway-api/conformance/echo-basic", FOLDER),
}
IMAGES = {
    "gcr.io/k8s-staging-gateway-api/echo-basic": [programs_folder() / "echo-basic"],
    "registry.k8s.io/gateway-api-inference-extension/lwepp": [Path(sys.executable), "-m", "e2e.neighbours.gaie.picker"],
}
NAMESPACE, BACKENDS = "conformance", "inference-conformance-app-backend"
PICKERS = [f"{name}-endpoint-picker-svc" for name in ("primary", "secondary", "dp", "appprotocol-http", "appprotocol-h2c")]
"""The Services of the suite's pickers, in `BACKENDS`."""
LIMIT_S = 1800.0
_RESULT = re.compile(r"^ {4}--- (PASS|FAIL|SKIP): TestConformance/(\w+) \(([\d.]+)s\)$", re.MULTILINE)


@contextmanager
def rights(cluster: Cluster) -> Iterator[None]:
    """What the suite needs (all), and what our picker reads beyond what the suite lets pickers read."""
    reads = {"apiGroups": ["penstock.dev"], "resources": ["inferencemodels", "loraadapters"], "verbs": ["get", "list", "watch"]}
    api, group = "rbac.authorization.k8s.io/v1", "rbac.authorization.k8s.io"

    def binding(name: str, role: str, account: dict[str, str]) -> dict[str, Any]:
        reference = {"apiGroup": group, "kind": "ClusterRole", "name": role}
        metadata = {"name": name}
        return {
            "apiVersion": api,
            "kind": "ClusterRoleBinding",
            "metadata": metadata,
            "roleRef": reference,
            "subjects": [account],
        }

    objects = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": api, "kind": "ClusterRole", "metadata": {"name": "suite-picker"}, "rules": [reads]},
        binding(
            "suite-picker", "suite-picker", {"kind": "Group", "apiGroup": group, "name": f"system:serviceaccounts:{BACKENDS}"}
        ),
        binding("suite", "cluster-admin", {"kind": "ServiceAccount", "name": "default", "namespace": NAMESPACE}),
    ]
    cluster.apply(*objects)
    yield
    cluster.kubectl("delete", "clusterrolebinding", "suite", "suite-picker")
    cluster.kubectl(
        "delete", "namespace", NAMESPACE, BACKENDS, "inference-conformance-infra", "--wait=false", "--ignore-not-found"
    )


def judged(cluster: Cluster, gateway_class: str, *flags: str) -> dict[str, tuple[str, float]]:
    """Runs the suite; `PASS`, `FAIL` or `SKIP` and the seconds it took, by test."""
    command = [
        str(programs_folder() / "gaie-conformance"),
        "-test.v",
        "-test.timeout=40m",
        f"-gateway-class={gateway_class}",
        *flags,
    ]
    container = {"name": "suite", "image": "none", "command": command}
    spec = {"restartPolicy": "Never", "containers": [container]}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "suite"}, "spec": spec}, namespace=NAMESPACE)
    eventually(lambda: _expect_ended(cluster), seconds=LIMIT_S)
    (log,) = cluster.processes.logs.glob(f"pods/{NAMESPACE}_suite_*/suite.log")
    said = log.read_text(errors="replace")
    results = {name: (result, float(seconds)) for result, name, seconds in _RESULT.findall(said)}
    assert results, said[-4000:]
    return results


def _expect_ended(cluster: Cluster) -> None:
    assert cluster.get("pod", "suite", NAMESPACE)["status"]["phase"] in ("Succeeded", "Failed")
