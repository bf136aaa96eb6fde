"""Processes of the local runtime: started so that none outlives this one, restarted when they end, stopped with grace."""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

BACKOFF_FIRST_S = 1.0
BACKOFF_MOST_S = 30.0
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Ask for SIGTERM when the starting thread ends, so that a killed parent leaves no processes. Runs in the child before
    exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


async def spawn(command: list[str], log: Path, env: Mapping[str, str] | None = None) -> asyncio.subprocess.Process:
    """Starts a process in a session of its own whose output goes to `log`; it dies with this process.

    Commands are looked up beside this Python first, so that `penstock` is this very one.
    """
    with log.open("ab") as out:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **(env or {})},
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )


async def terminate(process: asyncio.subprocess.Process, grace_s: float) -> None:
    """SIGTERM to the process, SIGKILL to its whole group when the grace period is over; returns when it is gone."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except TimeoutError:
            logger.warning("process %d did not end in %.0f s and is killed", process.pid, grace_s)
    kill_group(process)
    await process.wait()


def kill_group(process: asyncio.subprocess.Process) -> None:
    """SIGKILL to the process and all that it started."""
    with contextlib.suppress(ProcessLookupError):  # nothing of the group is left, which is what was wanted
        os.killpg(process.pid, signal.SIGKILL)


async def restart_forever(run: Callable[[], Awaitable[str]]) -> None:
    """Runs something again whenever it ends, as a kubelet does: after a pause that doubles while it keeps ending early.

    Args:
        run: Starts it and returns at its end, with the reason.
    """
    backoff = BACKOFF_FIRST_S
    while True:
        began = time.monotonic()
        logger.warning("%s", await run())
        if time.monotonic() - began > BACKOFF_MOST_S:
            backoff = BACKOFF_FIRST_S
        await asyncio.sleep(backoff)
        backoff = min(backoff * 2, BACKOFF_MOST_S)


def cause_of_end(code: int, log: Path) -> str:
    """How a process ended, and the last line that it wrote where it ended by itself."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return f"exit status {code}: {lines[-1].strip() if lines else 'it said nothing'}"


class Service:
    """A process that is always wanted, such as the gateway or Envoy.

    Args:
        name: For people.
        command: What is run.
        log: Where its output goes.
    """

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self.restarts = 0
        self.message = ""
        """Why it does not run now; empty while it does."""
        self._command = command
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The present process, once started."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Begins to run and supervise the process."""
        self._task = asyncio.create_task(restart_forever(self._run), name=f"service {self.name}")

    async def stop(self, grace_s: float) -> None:
        """Ends the process, with force after the grace period."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._process is not None:
            await terminate(self._process, grace_s)

    async def _run(self) -> str:
        self._process = await spawn(self._command, self._log)
        self.message = ""
        code = await self._process.wait()
        self.restarts += 1
        self.message = cause_of_end(code, self._log)
        return f"{self.name} ended: {self.message}"
