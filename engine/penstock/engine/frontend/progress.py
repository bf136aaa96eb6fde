"""Whether the core makes progress: the verdict of `/health`."""

from penstock.engine.messages import CoreStats

STUCK_S = 30.0


class Progress:
    """Judges by what the core says: it reports at least once a second while idle, and its step count rises while it works.

    Args:
        now: Monotonic time in seconds, as in every method.
    """

    def __init__(self, now: float) -> None:
        self._heard = now
        self._moved = now
        self._steps = -1

    def heard(self, now: float) -> None:
        """The core said anything at all."""
        self._heard = now

    def stats(self, stats: CoreStats, working: bool, now: float) -> None:
        """The core sent a report; `working`: requests were live."""
        self._heard = now
        if not working or stats.steps != self._steps:
            self._moved = now
        self._steps = stats.steps

    def stuck(self, working: bool, now: float) -> str | None:
        """What is wrong, or None."""
        if now - self._heard > STUCK_S:
            return f"the engine core has said nothing for {now - self._heard:.0f} s"
        if working and now - self._moved > STUCK_S:
            return f"the engine core has made no step for {now - self._moved:.0f} s while requests wait"
        return None
