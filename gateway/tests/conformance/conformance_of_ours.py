"""Starts a gateway over a fleet in a file and runs `penstock-epp-conformance` and our own checks on it: `make conformance`.

Arguments are the suite's, without `--target`, `--model` and `--endpoint`; after `--` come the gateway's.
"""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from gateway.tests.conformance.own_checks import OWN
from penstock.api.fleet import Fleet, Model, Pool, Replica
from penstock.epp_conformance.cli import main
from testing.ports import free_ports

MODEL = "tiny"
START_LIMIT_S = 120.0
ANSWER_LIMIT_S = 60.0
"""The machine may be busy with something else."""


def hosts() -> list[str]:
    """Where the replicas are: two ports of one address, and one of another, of IPv6 where this machine has it."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return ["127.0.0.1", "127.0.0.1", "127.0.0.2"]
    return ["127.0.0.1", "127.0.0.1", "::1"]


def fleet(ports: Sequence[int]) -> Fleet:
    """One model with one pool, a replica on each port."""
    pool = Pool(id="default/tiny/main", model="default/tiny")
    model = Model(id="default/tiny", served_names=[MODEL], hold_timeout_s=1.0)
    replicas = [
        Replica(uid=f"u{n}", name=f"r{n}", pool=pool.id, host=host, port=port, events_port=1, replay_port=1, ready=True)
        for n, (host, port) in enumerate(zip(hosts(), ports, strict=True))
    ]
    return Fleet(models=[model], pools=[pool], replicas=replicas)


@contextlib.contextmanager
def gateway(folder: Path, *flags: str) -> Iterator[tuple[str, list[str]]]:
    """A running gateway: its ext_proc address, and the endpoints of its fleet, which nobody serves yet."""
    grpc_port, http_port, *ports = free_ports(2 + len(hosts()))
    replicas = fleet(ports)
    (folder / "fleet.json").write_bytes(msgspec.json.encode(replicas))
    command = [sys.executable, "-m", "penstock.cli", "gateway", "--discovery", f"file:{folder / 'fleet.json'}"]
    command += ["--grpc-port", str(grpc_port), "--http-port", str(http_port), *flags]
    with (folder / "gateway.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        _wait(http_port, process, folder / "gateway.log")
        yield f"127.0.0.1:{grpc_port}", [replica.endpoint for replica in replicas.replicas]
    finally:
        process.kill()
        process.wait()


def _wait(http_port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Returns when the gateway knows its fleet and answers."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{http_port}/readyz", timeout=5):
            return
        time.sleep(0.05)
    raise RuntimeError(f"the gateway does not get ready:\n{log.read_text()}")


def judge(flags: Sequence[str], *suite: str) -> int:
    """Runs the suite on a gateway with `flags`; its exit status."""
    with tempfile.TemporaryDirectory() as folder, gateway(Path(folder), *flags) as (target, endpoints):
        told = [flag for endpoint in endpoints for flag in ("--endpoint", endpoint)]
        own = ("--serve-endpoints", "--strict", "--timeout", str(ANSWER_LIMIT_S))
        return main(["--target", target, "--model", MODEL, *told, *own, *suite], more=OWN)


if __name__ == "__main__":
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    sys.exit(judge(sys.argv[split + 1 :], *sys.argv[1:split]))
