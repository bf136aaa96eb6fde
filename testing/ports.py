"""Ports for servers that tests start in other processes, where the system cannot choose."""

import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO

# Below the range from which systems choose by themselves, so that nobody is given one between our choice and the server's start.
RANGE = range(12_000, 30_000)


def free_ports(count: int) -> list[int]:
    """So many ports of 127.0.0.1 that nobody listens on. Each is given once, and to one process of all that ask here."""
    ports: list[int] = []
    for port in _candidates():
        if len(ports) == count:
            return ports
        if _is_mine(port) and _is_free(port):
            ports.append(port)
    raise RuntimeError(f"no port of {RANGE} is left")


@cache
def _candidates() -> Iterator[int]:
    return iter(random.SystemRandom().sample(RANGE, len(RANGE)))


@cache
def _locks() -> BinaryIO:
    return (Path(tempfile.gettempdir()) / f"penstock-test-ports-{os.getuid()}").open("ab")


def _is_mine(port: int) -> bool:
    """Locks the byte of that number: the lock goes with this process, and no process that it starts has it."""
    try:
        fcntl.lockf(_locks(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
