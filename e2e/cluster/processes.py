"""The cluster's programs: started in the background, remembered by process id, watched until ready, and stopped."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from e2e.cluster import network
from e2e.cluster.commands import TestbedError


class Processes:
    """Programs in one network namespace, which the caller has entered. Any other process may stop them later.

    Logs are `state/logs/NAME.log`, process ids `state/run/NAME.pid`.
    """

    def __init__(self, state: Path, namespace: str) -> None:
        self.logs = state / "logs"
        self._pids = state / "run"
        self._namespace = namespace
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def create_folders(self) -> None:
        self.logs.mkdir()
        self._pids.mkdir()

    def start(
        self, name: str, argv: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        with (self.logs / f"{name}.log").open("ab") as log:
            # A session of its own: Ctrl-C is for the testbed, which then stops its programs in order.
            child = subprocess.Popen(
                argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, close_fds=True
            )
        self._children[name] = child
        (self._pids / f"{name}.pid").write_text(str(child.pid))

    def wait_until_ready(self, name: str, ready: Callable[[], bool], seconds: float = 60) -> None:
        """Raises TestbedError, with the end of its log, when the program dies or is not ready in that time."""
        deadline = time.monotonic() + seconds
        while not ready():
            if not self.is_running(name):
                raise TestbedError(f"{name} died:\n{self.tail(name)}")
            if time.monotonic() > deadline:
                raise TestbedError(f"{name} is not ready after {seconds:g} s:\n{self.tail(name)}")
            time.sleep(0.1)

    def is_running(self, name: str) -> bool:
        if name in self._children:
            self._children[name].poll()  # wait for it if it is dead: a zombie would look alive to nobody but us
        return (pid := self.pid(name)) is not None and network.holds(self._namespace, pid)

    def names(self) -> list[str]:
        """The programs that were started and not stopped."""
        return sorted(path.stem for path in self._pids.glob("*.pid"))

    def stop(self, name: str, seconds: float = 10) -> None:
        """TERM; KILL when it is still there after that time. Without any time only KILL."""
        pid, deadline = self.pid(name), time.monotonic() + seconds
        if pid is not None and seconds and self.is_running(name):
            os.kill(pid, signal.SIGTERM)
        while self.is_running(name) and time.monotonic() < deadline:
            time.sleep(0.05)
        if pid is not None and self.is_running(name):
            os.kill(pid, signal.SIGKILL)
            if name in self._children:
                self._children[name].wait(timeout=10)
        (self._pids / f"{name}.pid").unlink(missing_ok=True)

    def reap(self) -> None:
        """Wait for the children that have been killed."""
        for child in self._children.values():
            child.wait(timeout=10)

    def tail(self, name: str, lines: int = 12) -> str:
        return "\n".join((self.logs / f"{name}.log").read_text(errors="replace").splitlines()[-lines:])

    def pid(self, name: str) -> int | None:
        """Its process id, if it was ever started. It may be another program's by now: see network.holds."""
        path = self._pids / f"{name}.pid"
        return int(path.read_text()) if path.is_file() else None
