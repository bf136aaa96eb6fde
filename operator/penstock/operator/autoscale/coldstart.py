"""How long a replica takes from its creation until it is ready, learned; and which of those that start count as supply. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

PRIOR_S = 30.0
MOST_S = 3600.0
"""A replica that took longer had waited for a node, or for a person."""


@dataclass(frozen=True)
class ColdStart:
    """What is known of a pool's starts."""

    seconds: float = PRIOR_S
    """Learned: the mean of what was known and the latest start."""
    oldest_s: float = 0.0
    """Age of the oldest replica that was starting at the last look."""
    starting: int = 0
    """How many were."""

    def observe(self, ages_s: Sequence[float], replicas: int) -> "ColdStart":
        """After a look at those that are starting, of a pool that is asked to have so many `replicas`. The oldest has become
        ready when it is no longer among them, unless the pool gave it up."""
        oldest = max(ages_s, default=0.0)
        became_ready = self.oldest_s > oldest and len(ages_s) < self.starting and replicas > len(ages_s)
        seconds = 0.5 * (self.seconds + min(self.oldest_s, MOST_S)) if became_ready else self.seconds
        return ColdStart(seconds, oldest, len(ages_s))

    def stuck(self, ages_s: Sequence[float], factor: float) -> int:
        """How many have been starting for longer than `factor` cold starts: they count for nothing."""
        return sum(age >= factor * self.seconds for age in ages_s)
