"""How long requests waited before they first ran, by what they waited for."""

from bisect import bisect_left

from penstock.api.load_report import WaitingReason
from penstock.engine.stats import Buckets

SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 900)


class Waits:
    """Adds up: a histogram of seconds for each reason that there was."""

    def __init__(self) -> None:
        self._counts: dict[WaitingReason, list[int]] = {}
        self._totals: dict[WaitingReason, float] = {}

    def started(self, waited: dict[WaitingReason, float]) -> None:
        """Record the first run of a request. `waited`: seconds by reason, whose sum is its time in the queue."""
        for reason, seconds in waited.items():
            counts = self._counts.setdefault(reason, [0] * (len(SECONDS) + 1))
            counts[bisect_left(SECONDS, seconds)] += 1
            self._totals[reason] = self._totals.get(reason, 0.0) + seconds

    def buckets(self) -> dict[WaitingReason, Buckets]:
        """Return the totals since the start."""
        return {reason: Buckets(list(counts), self._totals[reason]) for reason, counts in self._counts.items()}
