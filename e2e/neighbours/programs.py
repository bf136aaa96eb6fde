"""Programs that a case starts, each with a log of its own, all ended with the case."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx

START_S = 600.0
"""What an engine of others may take until it is ready: on a busy machine vLLM alone imports for two minutes."""


class Programs:
    """Starts programs, and kills them one by one or all.

    Args:
        folder: Of their logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str | Path | int], environment: Mapping[str, str] | None = None) -> None:
        """Start one; what it starts itself ends with it."""
        words = [str(word) for word in command]
        known = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(words, stdout=log, stderr=log, env=known, start_new_session=True)

    def penstock(self, name: str, *arguments: str | Path | int) -> None:
        """Start a command of ours."""
        self.start(name, [sys.executable, "-m", "penstock.cli", *arguments])

    def log(self, name: str) -> str:
        """What it has said."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str) -> None:
        """Kill one, as a machine that fails would."""
        process = self._running.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        """Kill all."""
        for name in list(self._running):
            self.kill(name)

    def wait(self, name: str, ready: Callable[[], bool], limit_s: float = START_S) -> None:
        """Wait until it is ready; fails with the end of its log where it ends first or takes too long."""
        deadline = time.monotonic() + limit_s
        while not ready():
            ended = self._running[name].poll() is not None
            assert not ended and time.monotonic() < deadline, f"{name} is not ready\n{self.log(name)[-3000:]}"
            time.sleep(0.5)


@contextlib.contextmanager
def programs(folder: Path) -> Iterator[Programs]:
    """They end with the block."""
    started = Programs(folder)
    try:
        yield started
    finally:
        started.stop()


def answers(url: str) -> bool:
    """Whether a GET is answered by 200."""
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False
