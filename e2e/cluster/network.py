"""Network namespaces: the cluster lives in one of its own with no way out, and each of its pods in another.

A testbed program enters the cluster's namespace first; whatever it starts inherits it. Ports therefore never clash with the
machine's own, and what a test sends cannot leave the machine.
"""

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.commands import run

POD_CIDR = "10.244.0.0/16"
GATEWAY = "10.244.0.1"  # the bridge's own address: pods find the API server there
SERVICE_CIDR = "10.96.0.0/16"
BRIDGE = "pods"

_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000


def create_cluster_network(name: str) -> None:
    """A namespace with a bridge for the pods."""
    run("ip", "netns", "add", name)
    run("ip", "-n", name, "link", "set", "lo", "up")
    run("ip", "-n", name, "link", "add", BRIDGE, "type", "bridge")
    run("ip", "-n", name, "addr", "add", f"{GATEWAY}/16", "dev", BRIDGE)
    run("ip", "-n", name, "link", "set", BRIDGE, "up")
    # Only so that packets to a Service set out: kube-proxy's rules turn them round.
    run("ip", "-n", name, "route", "add", SERVICE_CIDR, "dev", BRIDGE)
    run("ip", "netns", "exec", name, "sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")


def create_pod_network(name: str, link: str, address: str) -> None:
    """A pod's namespace, joined to the bridge. Called from inside the cluster's namespace.

    `link` names the bridge's end of the cable (at most 15 characters); the pod's end is eth0.
    """
    run("ip", "netns", "add", name)
    run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
    run("ip", "link", "set", link, "master", BRIDGE, "up")
    run("ip", "-n", name, "addr", "add", f"{address}/16", "dev", "eth0")
    run("ip", "-n", name, "link", "set", "eth0", "up")
    run("ip", "-n", name, "link", "set", "lo", "up")
    run("ip", "-n", name, "route", "add", "default", "via", GATEWAY)


def disconnect(name: str) -> None:
    """Pull the cable of a pod's namespace: its processes do not notice, and nothing of them gets out any more."""
    run("ip", "-n", name, "link", "set", "eth0", "down")


def enter(name: str) -> None:
    """Move the calling thread, and what it starts from now on, into that namespace."""
    descriptor = os.open(_NAMESPACES / name, os.O_RDONLY)
    try:
        _set_namespace(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def entered(name: str) -> Iterator[None]:
    """enter(), and back at the end."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        enter(name)
        yield
    finally:
        _set_namespace(before)
        os.close(before)


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns is there from Python 3.12 on
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def namespaces(prefix: str) -> list[str]:
    """The names of the network namespaces that begin with that."""
    return sorted(path.name for path in _NAMESPACES.glob(f"{prefix}*"))


def holds(name: str, pid: int) -> bool:
    """Whether that process is alive and in that namespace. A dead one that nobody has waited for is in none."""
    try:
        return Path(f"/proc/{pid}/ns/net").samefile(_NAMESPACES / name)
    except OSError:  # it, or the namespace, has just gone
        return False


def pids(name: str) -> list[int]:
    """The processes in that namespace."""
    return [pid for pid in (int(folder.name) for folder in Path("/proc").glob("[0-9]*")) if holds(name, pid)]


def remove(name: str) -> None:
    """Kill the processes in that namespace, then the namespace."""
    deadline = time.monotonic() + 10
    while living := pids(name):
        for pid in living:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it ended by itself meanwhile
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {living} in network namespace {name} survive SIGKILL")
        time.sleep(0.02)
    run("ip", "netns", "del", name)
