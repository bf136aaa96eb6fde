"""A real Mooncake store for tests."""

import socket
import subprocess
import sys
import time
from pathlib import Path

from testing.ports import free_ports

_MASTER, _MEMORY = (Path(sys.executable).with_name(f"mooncake_{part}") for part in ("master", "client"))


class Mooncake:
    """A master, and a process that gives the store memory.

    Args:
        host: The address at which engines reach both.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        port, metrics, memory = free_ports(3)
        self.uri = f"mooncake://{host}:{port}"
        self.master = self._start(_MASTER, f"--rpc_port={port}", f"--metrics_port={metrics}")
        self._wait(port, self.master)
        master = ("--metadata_server=P2PHANDSHAKE", "--protocol=tcp", f"--master_server_address={host}:{port}")
        self.memory = self._start(_MEMORY, f"--host={host}", *master, "--global_segment_size=64MB", f"--port={memory}")
        self._wait(memory, self.memory)

    @staticmethod
    def is_installed() -> bool:
        """Whether its programs are there: make kv-parts."""
        return _MASTER.exists()

    def close(self) -> None:
        """Ends both."""
        for process in (self.memory, self.master):
            process.kill()
            process.wait()

    def _start(self, program: Path, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _wait(self, port: int, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection((self._host, port), 1).close()
                return
            except OSError:
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.05)
