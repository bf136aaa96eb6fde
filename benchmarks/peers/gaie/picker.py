"""The Gateway API Inference Extension's own endpoint picker (its last full one, v1.5.0), to be measured beside ours.

It is built from its Go module with the pins in this folder, and finds its pool and pods at a real API server: etcd and
kube-apiserver of the cluster tier, without controllers or nodes, in a network namespace that the caller enters. Its configuration
is its default: the scorers for queue, KV usage and prefix cache.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console

from e2e.cluster import network
from e2e.cluster.build import Program, build, find_go, programs_folder
from e2e.cluster.cluster import Cluster
from e2e.cluster.commands import TestbedError, run
from e2e.cluster.phases import Phases

FOLDER = Path(__file__).parent
MODULE = "sigs.k8s.io/gateway-api-inference-extension"
PROGRAMS = {"gaie-epp": Program(f"{MODULE}/cmd/epp", FOLDER)}
POOL = "peers"
LABELS = {"app": POOL}
READY_S = 60.0


def build_picker(console: Console) -> None:
    """Builds it and the control plane that it needs, where they are missing; raises TestbedError when that fails."""
    build(console)
    build(console, PROGRAMS)


@contextmanager
def api_server(console: Console, name: str = "bench-peers") -> Iterator[Cluster]:
    """An API server that knows InferencePools; the caller is in its network, called `name`, meanwhile."""
    cluster = Cluster(name)
    cluster.create()
    try:
        with network.entered(cluster.name):
            cluster.start([_crds(console)], Phases(console.print), controllers=False)
            cluster.kubectl("create", "serviceaccount", "default")  # the controllers would have made it
            yield cluster
    finally:
        cluster.stop()


@contextmanager
def picker(cluster: Cluster, addresses: Sequence[str], port: int, grpc_port: int) -> Iterator[int]:
    """The picker over replicas at `addresses`, all with the same `port`; its process id. Raises TestbedError where it does not
    become ready."""
    cluster.apply(_pool(port), *(_pod(n) for n in range(len(addresses))))
    ready = [_pod(n) | {"status": _status(address)} for n, address in enumerate(addresses)]
    cluster.kubectl("replace", "--subresource=status", "--filename=-", stdin=yaml.safe_dump_all(ready), timeout=300)
    flags = [f"--pool-name={POOL}", "--pool-namespace=default", f"--grpc-port={grpc_port}", f"--grpc-health-port={grpc_port + 1}"]
    flags += [f"--metrics-port={grpc_port + 2}", "--metrics-endpoint-auth=false", "--secure-serving=false", "--tracing=false"]
    flags += ["--zap-log-level=error", "--enable-pprof=false"]
    name = f"gaie-epp-{len(addresses)}"
    command = [programs_folder() / "gaie-epp", *flags]
    cluster.processes.start(name, command, env=os.environ | cluster.environment | {"NAMESPACE": "default"})
    try:
        cluster.processes.wait_until_ready(name, lambda: _serving(grpc_port + 1), READY_S)
        time.sleep(1.0)  # its first look at the replicas' metrics
        pid = cluster.processes.pid(name)
        assert pid is not None
        yield pid
    finally:
        cluster.processes.stop(name)
        cluster.kubectl("delete", "pods", "--all", "--grace-period=0", "--force", timeout=300)


def _serving(port: int) -> bool:
    request = health_pb2.HealthCheckRequest(service="inference-extension")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=2)  # pyright: ignore[reportAttributeAccessIssue]
        except grpc.RpcError:
            return False
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def _crds(console: Console) -> Path:
    """The resource definitions that come inside the module."""
    module = run(*find_go(console), "list", "-C", str(FOLDER), "-m", "-f", "{{.Dir}}", MODULE).strip()
    folder = Path(module) / "config" / "crd" / "bases"
    if not folder.is_dir():
        raise TestbedError(f"{MODULE} has no {folder}")
    return folder


def _pool(port: int) -> dict[str, Any]:
    picker_reference = {"kind": "Service", "name": "picker", "port": {"number": 9002}}
    spec = {"selector": {"matchLabels": LABELS}, "targetPorts": [{"number": port}], "endpointPickerRef": picker_reference}
    return {"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool", "metadata": {"name": POOL}, "spec": spec}


def _pod(number: int) -> dict[str, Any]:
    metadata = {"name": f"replica-{number}", "namespace": "default", "labels": LABELS}
    containers = [{"name": "engine", "image": "engine"}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": containers}}


def _status(address: str) -> dict[str, Any]:
    return {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": [{"type": "Ready", "status": "True"}],
    }
