"""Profiles of the core's steps: of the scheduler here, of the model in its runner."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.engine.core.control.control_error import ControlError
from penstock.engine.core.executor import Executor
from penstock.engine.core.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from penstock.engine.ranges import Ranges

_log = logging.getLogger(__name__)


class Profiles:
    """One at a time.

    Args:
        scheduler: Of the core.
        executor: Of the core.
        folder: Where they are written; None: none are made.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, folder: Path | None) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._folder = folder
        self._ranges: Ranges | None = None

    def start(self) -> None:
        """Profiles from the next step on; `ControlError` where that cannot be."""
        from penstock.engine.ranges import Ranges  # brings torch, which the core has where it can be profiled

        if self._folder is None:
            raise ControlError("the engine was started without --profile-dir")
        if self._ranges is not None:
            raise ControlError("a profile is being made already")
        self._executor.call("start_profile")
        self._ranges = Ranges()
        self._ranges.around(self._scheduler, "schedule", "schedule")
        self._ranges.around(self._scheduler, "update", "update")

    def stop(self) -> str:
        """Ends the profile and returns its file; `ControlError` where there is none or it cannot be written."""
        if self._ranges is None or self._folder is None:
            raise ControlError("no profile is being made")
        self._ranges.end()
        self._ranges = None
        try:
            path, *_ = self._executor.call("stop_profile", self._folder)
        except OSError as error:
            raise ControlError(f"the profile could not be written: {error}") from error
        _log.info("profile written to %s", path)
        return path
