"""Decide which of several processes fills a folder: a lock file with its owner, on any file system, also one mounted by several
machines.

The lock does not depend on the machines' clocks: the owner writes a new count every few seconds, and a waiting process that sees
no new count for long enough takes the owner for dead.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final
from uuid import uuid4

from penstock.sources.errors import SourceError

BEAT_S: Final = 2.0
DEAD_S: Final = 20.0
"""Seconds without a new count after which the owner is taken for dead."""


class Lock:
    """Held between `acquire` and `release`."""

    def __init__(self, path: Path, *, beat_s: float = BEAT_S, dead_s: float = DEAD_S) -> None:
        self._path = path
        self._beat_s, self._dead_s = beat_s, dead_s
        self.owner: Final = f"{socket.gethostname()}.{os.getpid()}.{uuid4().hex[:8]}"
        self._lost = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, waiting: Callable[[str], None]) -> None:
        """Returns as the owner.

        Args:
            waiting: Called about once a second with the present owner meanwhile.
        """
        seen, since = "", time.monotonic()
        while not self._create():
            content = _read(self._path)
            if content != seen:
                seen, since = content, time.monotonic()
            elif time.monotonic() - since > self._dead_s:
                self._break(seen)
                continue
            waiting(seen.partition(" ")[0])
            time.sleep(min(1.0, self._dead_s / 4))
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises SourceError where another has taken the lock, since this process was held up for long."""
        if self._lost:
            raise SourceError("Unreachable", f"{self._path}: was taken over by another process")

    def release(self) -> None:
        """Lets the next one in."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if not self._lost:
            self._path.unlink(missing_ok=True)

    def _create(self) -> bool:
        try:
            with self._path.open("x") as file:
                file.write(f"{self.owner} 0")
        except FileExistsError:
            return False
        return True

    def _break(self, dead: str) -> None:
        """Takes a dead one's lock away. Another may have done so before and hold it: then its lock is put back."""
        aside = self._path.with_suffix(f".{uuid4().hex[:8]}")
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return
        if _read(aside) != dead:
            # Where a third one has it by now, the owner of the one set aside sees that it lost it.
            with contextlib.suppress(FileExistsError):
                os.link(aside, self._path)
        aside.unlink(missing_ok=True)

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(self._beat_s):
            count += 1
            if _read(self._path).partition(" ")[0] != self.owner:
                self._lost = True
                return
            fresh = self._path.with_suffix(f".{self.owner}")
            fresh.write_text(f"{self.owner} {count}")
            fresh.replace(self._path)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
