"""How long a replica takes from its creation until it is first ready, learned; and which of those that start count as supply.
Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PRIOR_S = 30.0
MOST_S = 3600.0
"""A replica that took longer had waited for a node, or for a person."""
PATIENCE_S = 600.0
"""While no start was seen, a replica that nothing keeps from starting counts as supply for so long: a large model may take
minutes to load, and replacing it early would buy the same capacity twice."""


@dataclass(frozen=True)
class Starting:
    """A replica that is not ready."""

    age_s: float
    troubled: bool = False
    """The replica cannot start: it cannot be scheduled, its image cannot be pulled, or its engine exits."""


@dataclass(frozen=True)
class ColdStart:
    """What is known of a pool's starts."""

    learned_s: float | None = None
    """Mean of what was known before and the latest start; None: no start was seen."""
    prior_s: float = PRIOR_S
    """Assumed while no start was seen."""

    @property
    def seconds(self) -> float:
        """The time that a start is expected to take."""
        return self.prior_s if self.learned_s is None else self.learned_s

    def observe(self, started_s: Iterable[float], prior_s: float = PRIOR_S) -> "ColdStart":
        """Update with the start times, in seconds, of replicas that became ready for the first time."""
        learned = self.learned_s
        for seconds in started_s:
            latest = min(max(seconds, 0.0), MOST_S)
            learned = latest if learned is None else 0.5 * (learned + latest)
        return ColdStart(learned, prior_s)

    def stuck(self, starting: Sequence[Starting], factor: float) -> int:
        """How many have been starting for longer than `factor` cold starts: they count for nothing."""
        late = factor * self.seconds
        patience = late if self.learned_s is not None else max(late, PATIENCE_S)
        return sum(it.age_s >= (late if it.troubled else patience) for it in starting)
