"""How much more demand may come to before help can: what it did lately. Pure.

A replica that is started now helps a cold start later. So what counts is how far demand rose within one cold start, at any moment
of the last hour; spare replicas that would have covered nineteen of twenty such rises should cover most of the next ones. On the
traces of `make bench-scaling` a fixed number of spare replicas does better, so this is no part of the autoscaler.
"""

import math
from collections import deque
from dataclasses import dataclass, replace

from penstock.operator.autoscale.windows import Samples, kept

SPAN_S = 3600.0
STEP_S = 10.0
"""Of observations that are closer together, the highest demand is kept."""
LEAST_S = 300.0
"""Seconds, and at least two cold starts, in which it only observes."""


@dataclass(frozen=True)
class Surges:
    """The demand of the last hour."""

    samples: Samples[float] = ()

    def observe(self, now: float, demand: float) -> "Surges":
        """Return the record after one more observation."""
        if self.samples and now - self.samples[-1][0] < STEP_S:
            at, before = self.samples[-1]
            return replace(self, samples=(*self.samples[:-1], (at, max(before, demand))))
        return replace(self, samples=kept((*self.samples, (now, demand)), now - SPAN_S))

    def rise(self, now: float, lead_s: float, share: float) -> float:
        """Return the largest rise of demand within `lead_s`, in that `share` of all moments. 0 while too little was observed.

        Args:
            now: The time of the last observation.
            lead_s: Seconds of a cold start.
            share: 0 to 1.
        """
        if not self.samples or now - self.samples[0][0] < max(LEAST_S, 2 * lead_s):
            return 0.0
        rises = sorted(_rises(self.samples, now, lead_s))
        return rises[max(math.ceil(share * len(rises)) - 1, 0)]


def _rises(samples: Samples[float], now: float, lead_s: float) -> list[float]:
    """Return, for each sample, the rise to the highest sample within `lead_s` after it. Samples with an incomplete window are
    left out."""
    ahead: deque[tuple[float, float]] = deque()
    """Samples of the window that none after them exceeds: the first is the highest."""
    found: list[float] = []
    entering = 0
    for at, demand in samples:
        if at + lead_s > now:
            break
        while entering < len(samples) and samples[entering][0] <= at + lead_s:
            while ahead and ahead[-1][1] <= samples[entering][1]:
                ahead.pop()
            ahead.append(samples[entering])
            entering += 1
        while ahead[0][0] < at:
            ahead.popleft()
        found.append(ahead[0][1] - demand)
    return found
