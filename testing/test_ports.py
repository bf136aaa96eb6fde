"""Processes that test beside each other never start servers on one port."""

import socket
import subprocess
import sys
from pathlib import Path

from testing.ports import free_ports

ASK = "from testing.ports import free_ports; print(*free_ports(3000))"


def test_a_port_is_given_to_one_process_alone() -> None:
    mine = free_ports(100)
    assert len({*mine, *free_ports(100)}) == 200
    asked = subprocess.run([sys.executable, "-c", ASK], capture_output=True, cwd=Path(__file__).parents[1], check=True)
    theirs = set(map(int, asked.stdout.split()))
    assert len(theirs) == 3000 and theirs.isdisjoint(mine)


def test_a_port_is_free() -> None:
    for port in free_ports(3):
        with socket.create_server(("127.0.0.1", port)):
            pass
