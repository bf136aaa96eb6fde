"""Whether the core makes progress: the verdict of `/live`."""

from penstock.api.load_report import LoadReport
from penstock.engine.stats import CoreStats


class Progress:
    """Judges by what the core says: it reports at least once a second while idle, and its step count rises while it works. A core
    that has said which command it carries out may be silent until that is done.

    Args:
        now: Monotonic time in seconds, as in every method.
        timeout: Seconds without progress that are a hang.
    """

    def __init__(self, now: float, timeout: float) -> None:
        self._timeout = timeout
        self._heard = now
        self._moved = now
        self._steps = 0
        self._command: str | None = None

    def heard(self, now: float) -> None:
        """The core said anything at all."""
        self._heard = now
        self._command = None

    def stats(self, stats: CoreStats, working: bool, now: float) -> None:
        """The core sent a report; `working`: requests were live."""
        if self._command is not None or not working or stats.paused or _all_parked(stats.report) or stats.steps != self._steps:
            self._moved = now
        self.heard(now)
        self._command = stats.command
        self._steps = stats.steps

    def stuck(self, working: bool, now: float) -> str | None:
        """What is wrong, or None."""
        if self._command is not None:
            return None
        if now - self._heard > self._timeout:
            return f"the engine core has said nothing for {now - self._heard:.0f} s: it hangs after step {self._steps}"
        if working and now - self._moved > self._timeout:
            return f"the engine core has made no step for {now - self._moved:.0f} s after step {self._steps} while requests wait"
        return None


def _all_parked(report: LoadReport) -> bool:
    """Whether the core knows of requests, and each of them waits for something that is not the core's to give."""
    return report.waiting > 0 and not report.num_requests_running and "capacity" not in report.num_requests_waiting
