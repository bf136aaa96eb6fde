"""Ranks whose processes are forked from one that has torch: to load it takes each 2 s of CPU, and its own work a tenth of that.

What the processes do is the same. Tests over HTTP start `penstock serve`, whose ranks start as they do for a user.
"""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fcntl import F_DUPFD, fcntl
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd

from penstock.engine.parallel import local_node, worker

START_WORKER = local_node.start_worker
PRELOADED = ["penstock.engine.runner.model_runner", "penstock.engine.parallel.worker"]
STANDARD = (1, 2)


class Forked:
    """As much of `subprocess.Popen` as a node asks of its ranks."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process, self.pid = process, process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (status := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # as `Popen` does: the fork server may have reaped it, and says so a moment later
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextmanager
def warm() -> Iterator[None]:
    """Leaves no process and no open file behind. The server of the standard library's forks starts with the first one."""
    yield
    gc.collect()
    # As Python's own tests end them: they would else end with this process.
    forkserver._forkserver._stop()
    resource_tracker._resource_tracker._stop()


def fork_worker(fds: tuple[int, int], passed: tuple[int, ...], environment: Mapping[str, str]):
    """As `start_worker` does. Where torch must read another environment when it is loaded, a new process loads it."""
    differs = {name for name in {*environment, *os.environ} if environment.get(name) != os.environ.get(name)}
    if differs:
        return START_WORKER(fds, passed, environment)
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    numbers = (*STANDARD, *fds, *passed)
    process = context.Process(target=_run, args=(fds, {number: DupFd(number) for number in numbers}, dict(environment), sys.path))
    process.start()
    return Forked(process)


def _run(fds: tuple[int, int], duplicates: dict, environment: dict[str, str], path: list[str]) -> None:
    """In the new process: what it is passed has the numbers that it has in the old one."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [*environment.get("PYTHONPATH", "").split(os.pathsep), *path]
    above = max(duplicates) + 1  # none may have the number of another
    moved = dict[int, int]()
    for number, duplicate in duplicates.items():
        moved[number] = fcntl(descriptor := duplicate.detach(), F_DUPFD, above)
        os.close(descriptor)
    for number, descriptor in moved.items():
        os.dup2(descriptor, number)
        os.close(descriptor)
    os._exit(worker.main(*fds))
