"""Addresses and ports of the local runtime."""

import errno
import itertools
import os
import socket
from collections.abc import Iterator

_PORTS = (8000, 9002, 9090)
"""Ports of an engine and of a gateway."""


class NetworkError(RuntimeError):
    """The local system cannot listen where it has to; the message says what to change."""


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port of `host` that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def port_is_free(host: str, port: int) -> bool:
    """Whether a listener could be opened there; raises `NetworkError` where it is not allowed at all."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise NetworkError(f"cannot listen on port {port} of {host}: {error.strerror}") from None
    return True


def addresses() -> Iterator[str]:
    """Loopback addresses that no other local system uses: those of a 127.N.0.0/16 chosen by process ID, skipping ones in use.

    Raises `NetworkError` where the system has only 127.0.0.1 on its loopback (macOS: `ifconfig lo0 alias` adds others), and where
    all are in use.
    """
    network = 1 + os.getpid() % 250
    for high, low in itertools.product(range(256), range(1, 255)):
        address = f"127.{network}.{high}.{low}"
        if all(port_is_free(address, port) for port in _PORTS):
            yield address
    ports = ", ".join(map(str, _PORTS))
    raise NetworkError(f"one of the ports {ports} is in use on every address: another program listens on all of them (0.0.0.0)")
