"""Waiting for what a cluster will come to."""

import time
from collections.abc import Callable
from typing import TypeVar

from e2e.cluster.commands import CommandError

T = TypeVar("T")


def eventually(check: Callable[[], T], seconds: float = 60) -> T:
    """What `check` returns once it fails neither an assertion nor a command; its last failure when that takes longer. A limit
    is several times what a quiet machine needs: who passes does not wait so long."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return check()
        except (AssertionError, CommandError):
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)
