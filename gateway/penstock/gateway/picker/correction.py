"""Replicas that report wrongly: how long first tokens took against how long the reports promised, as a factor on the price.

What is compared are seconds, not requests: sums of promised and of taken seconds, which fade, so that many short waits say as
little as they matter. What all replicas of a model take longer than promised is an error of the estimate and changes no choice;
only how much one differs from the others is corrected.
"""

from statistics import median_low
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

HALF_LIFE_S: Final = 60.0
"""Seconds after which a comparison counts half, so that a replica without requests is trusted again in time."""
PRIOR_S: Final = 5.0
"""Seconds that are taken to have come true: with fewer of them observed little is corrected."""
TOLERATED = 2.0
"""Estimates miss by so much now and then, by the replica that a burst falls on: only what lies beyond is its reports' fault. By
simulation (`make bench-routing`): without this a fleet whose replicas all report well is less evenly loaded."""
LEAST, MOST = 0.5, 16.0
"""Bounds of the factor. One that does better than its reports is rare and gains little; one that does worse draws all traffic."""
LONGEST_S: Final = 600.0
"""Longer times to the first token count as this long."""


def corrections(promised: Floats, taken: Floats) -> Floats:
    """The factor on each row's promise, 1 where there is nothing to say. All float64 [rows].

    Args:
        promised: Seconds to the first token as the reports had it, summed up.
        taken: Seconds that it really took, summed up.
    """
    compared = promised > 0
    if not compared.any():
        return np.ones(len(promised))
    ratios = (taken + PRIOR_S) / (promised + PRIOR_S)
    of_those_compared: list[float] = ratios[compared].tolist()
    factors = np.where(compared, ratios / median_low(of_those_compared), 1.0)
    # In full from the square of what is tolerated on, and without a jump before.
    beyond = (factors / np.clip(factors, 1 / TOLERATED, TOLERATED)) ** 2
    return np.clip(np.clip(beyond, np.minimum(factors, 1.0), np.maximum(factors, 1.0)), LEAST, MOST)


def fading(elapsed_s: float) -> float:
    """What is left of the sums after so long."""
    return 2.0 ** -(elapsed_s / HALF_LIFE_S)
