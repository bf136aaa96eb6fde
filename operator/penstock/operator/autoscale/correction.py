"""What clients really get, and by how much that makes demand more or less. Late by nature: it corrects the size slowly and
never drives it. Pure."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.api.fleet import LATENCY_EDGES_S
from penstock.operator.autoscale.limits import Goals

WINDOW_S = 120.0
LEAST_REQUESTS = 20
"""Fewer first tokens in the window say nothing."""
STEP_UP, STEP_DOWN = 1.1, 0.98
LEAST, MOST = 0.8, 2.0
"""Bounds of the factor."""
HELPED = 0.75
"""More replicas helped if at most this share of the former lateness is left."""
RETRY_S = 3600.0
"""Seconds after which a goal that was given up as out of reach is tried again."""
PLENTY = 0.25
"""Share of the allowed lateness below which there is room to save."""


@dataclass(frozen=True)
class Seen:
    """What was counted at some time."""

    at: float
    counts: tuple[int, ...]
    """First tokens by time, cumulative over the life of the gateways that count them; see `LATENCY_EDGES_S`."""
    itl_late: float
    """Share of the running requests whose tokens come too late."""


@dataclass(frozen=True)
class Correction:
    """What demand is multiplied by, and what it was learned from."""

    factor: float = 1.0
    changed_at: float | None = None
    seen: tuple[Seen, ...] = ()
    late_at_first: float | None = None
    """The lateness when the factor last began to rise above 1."""
    gave_up_at: float | None = None
    """When the factor had risen to `MOST` and nothing was won; None: it was not given up."""

    def observe(self, seen: Seen, goals: Goals, *, settled: bool, filled: bool, pause_s: float) -> "Correction":
        """Return the correction after one more observation.

        Args:
            settled: No replica is starting and none was added lately, so lateness now means that the pool is too small.
            filled: The size follows demand, so a smaller factor would reduce the size.
            pause_s: Seconds between two changes. The effect of the last change must show first.
        """
        kept = tuple(one for one in self.seen if one.at >= seen.at - WINDOW_S)
        changed = replace(self, seen=(*kept, seen), changed_at=seen.at if self.changed_at is None else self.changed_at)
        late = changed.late(goals)
        if late is None or not settled or seen.at - (changed.changed_at or 0.0) < pause_s:
            return changed
        allowed = 1 - goals.share
        if late > allowed:
            new = changed._more(late, seen.at)
        else:
            factor = max(changed.factor * STEP_DOWN, LEAST) if late <= allowed * PLENTY and filled else changed.factor
            new = replace(changed, factor=factor, gave_up_at=None)
        return replace(new, changed_at=seen.at, seen=(seen,)) if new.factor != changed.factor else new

    def _more(self, late: float, now: float) -> "Correction":
        """React to too much lateness: a larger factor, or none if the largest did not help."""
        if self.gave_up_at is not None and now - self.gave_up_at < RETRY_S:
            return self
        rising = self.factor > 1.0 and self.late_at_first is not None
        first = self.late_at_first if rising and self.late_at_first is not None else late
        if self.factor < MOST:
            return replace(self, factor=min(self.factor * STEP_UP, MOST), late_at_first=first, gave_up_at=None)
        if late <= HELPED * first:
            return self
        return replace(self, factor=1.0, late_at_first=None, gave_up_at=now)

    def late(self, goals: Goals) -> float | None:
        """The share of requests that did not get what is promised, of late; None where too few were seen."""
        if len(self.seen) < 2:
            return None
        shares: list[float] = []
        if goals.ttft_s is not None:
            counts = _between(self.seen[0].counts, self.seen[-1].counts)
            total = sum(counts)
            if total < LEAST_REQUESTS:
                return None
            in_time = sum(counts[: bisect_right(LATENCY_EDGES_S, goals.ttft_s)])
            shares.append(1 - in_time / total)
        if goals.itl_s is not None:
            shares.append(sum(one.itl_late for one in self.seen) / len(self.seen))
        return max(shares)


def _between(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Return the counts between two readings, or all counts after a restart of the counter."""
    if len(before) != len(after) or any(b > a for b, a in zip(before, after, strict=True)):
        return list(after)
    return [a - b for b, a in zip(before, after, strict=True)]
