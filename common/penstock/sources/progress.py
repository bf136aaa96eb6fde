"""Progress of a download, for other threads to read."""

import threading
from dataclasses import dataclass
from typing import Literal

Phase = Literal["resolving", "waiting", "downloading", "verifying", "done"]


@dataclass(frozen=True)
class Snapshot:
    """Progress at one moment."""

    phase: Phase
    done: int
    """Bytes that are there."""
    total: int
    """Bytes in all; 0 before that is known."""
    waits_for: str = ""
    """The process that fills the folder, if it is another one."""


class Progress:
    """Written by the threads of a download, read by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = Snapshot("resolving", 0, 0)

    @property
    def now(self) -> Snapshot:
        """The latest."""
        return self._now

    def enter(self, phase: Phase, total: int = 0, waits_for: str = "") -> None:
        """Begins a phase, from no bytes on."""
        with self._lock:
            self._now = Snapshot(phase, 0, total, waits_for)

    def add(self, count: int) -> None:
        """Count more bytes as done."""
        with self._lock:
            now = self._now
            self._now = Snapshot(now.phase, now.done + count, now.total, now.waits_for)
