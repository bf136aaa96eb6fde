"""The Gateway API Inference Extension's picker as one more arm of `make bench-gateway`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.gatewaybench.arms import Arm, Process, Start, free_ports
from benchmarks.gatewaybench.duplex import under_envoy
from benchmarks.peers.gaie.picker import api_server, build_picker, picker
from e2e.cluster.cluster import Cluster

NAME = "GAIE 1.5.0"


@contextmanager
def gaie_arm(console: Console) -> Iterator[Start]:
    """How to start the arm, for as long as there is an API server; the caller is in its network meanwhile."""
    build_picker(console)
    with api_server(console) as cluster:
        yield partial(_arm, cluster)


@contextmanager
def _arm(cluster: Cluster, replicas: list[tuple[str, int]], folder: Path) -> Iterator[Arm]:
    grpc_port = free_ports(3)
    hosts, port = [host for host, _ in replicas], replicas[0][1]
    with (
        picker(cluster, hosts, port, grpc_port) as pid,
        under_envoy(Process(pid), grpc_port, replicas, folder) as arm,
    ):
        yield arm
