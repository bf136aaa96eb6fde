"""Progress of the loading of weights: a bar on a terminal, otherwise lines in the log."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

log = logging.getLogger(__name__)

PERIOD_S = 5.0
"""Between two lines in the log: a load that is quicker says nothing but its end."""


class Progress:
    """Counts bytes, and tells the log every `PERIOD_S`.

    Args:
        total: Bytes in all.
    """

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self._told = time.monotonic()

    def add(self, size: int) -> None:
        """Count more bytes as loaded."""
        self.done += size
        now = time.monotonic()
        if now - self._told >= PERIOD_S:
            self._told = now
            share = self.done / max(self.total, 1)
            log.info("weights: %.0f%% of %.2f GB", 100 * share, self.total / 1e9)


class _BarProgress(Progress):
    """The same as a bar."""

    def __init__(self, total: int, bar: Bar) -> None:
        super().__init__(total)
        self._bar, self._task = bar, bar.add_task("weights", total=total)

    def add(self, size: int) -> None:
        self._bar.update(self._task, advance=size)


@contextmanager
def show_progress(total: int) -> Iterator[Progress]:
    """Show progress while the weights load."""
    if not sys.stderr.isatty():
        yield Progress(total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _BarProgress(total, bar)
