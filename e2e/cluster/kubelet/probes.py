"""Probes and hooks: one attempt, in the container or against its address."""

import http.client
import socket
import ssl
import subprocess
from collections.abc import Mapping
from pathlib import Path

from e2e.cluster.kubelet.api import Object


def attempt(handler: Object, address: str, ports: list[Object], pid: int, environment: Mapping[str, str], timeout: float) -> bool:
    """Whether one exec, httpGet or tcpSocket handler succeeds within `timeout` seconds; a grpc one is taken as tcpSocket.

    `ports` are the container's, for a handler that names one; `pid` is the container's first process.
    """
    try:
        if "exec" in handler:
            return execute(pid, handler["exec"]["command"], environment, timeout) == 0
        if "httpGet" in handler:
            return _get(handler["httpGet"], address, ports, timeout)
        target = handler.get("tcpSocket") or handler["grpc"]
        socket.create_connection((target.get("host", address), _port(target, ports)), timeout).close()
        return True
    except (
        OSError,
        ValueError,
        http.client.HTTPException,
        subprocess.TimeoutExpired,
    ):  # ValueError: a port name that no port has
        return False


def execute(pid: int, command: list[str], environment: Mapping[str, str], timeout: float) -> int:
    """The exit code of a command run in a container's namespaces and root."""
    if Path(f"/proc/{pid}/root").stat().st_dev == Path("/").stat().st_dev:
        raise OSError("the container is not in its own root yet")
    enter = ["nsenter", f"--target={pid}", "--net", "--mount", "--uts", "--root", "--wd"]
    done = subprocess.run([*enter, *command], env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout)
    return done.returncode


def _get(target: Object, address: str, ports: list[Object], timeout: float) -> bool:
    host, port = target.get("host", address), _port(target, ports)
    if target.get("scheme") == "HTTPS":
        unverified = ssl._create_unverified_context()  # a kubelet does not verify either
        connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=unverified)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        headers = {header["name"]: header["value"] for header in target.get("httpHeaders", [])}
        connection.request("GET", target.get("path", "/"), headers=headers)
        return 200 <= connection.getresponse().status < 400
    finally:
        connection.close()


def _port(target: Object, ports: list[Object]) -> int:
    named = {port["name"]: port["containerPort"] for port in ports if "name" in port}
    return int(named.get(target["port"], target["port"]))
