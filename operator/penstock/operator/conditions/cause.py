"""What is wrong with a model's replicas, which several conditions tell."""

from penstock.operator.observed import Observed


def cause(observed: Observed) -> tuple[str, str]:
    """Reason and message of what is wrong, empty where nothing is."""
    if observed.fetching is not None and observed.fetching.failed:
        return observed.fetching.reason, observed.fetching.message
    if observed.blocked:
        return "RolloutBlocked", observed.blocked
    if observed.troubles:
        return observed.troubles[0].reason, observed.troubles[0].message
    if observed.stuck:
        return "ProgressDeadlineExceeded", observed.stuck
    return "", ""
