"""`PodsReady`: all replicas of the present revision are ready."""

from penstock.operator.conditions.verdict import Verdict
from penstock.operator.observed import Observed


def judge(observed: Observed) -> Verdict:
    short = [pool for pool in observed.pools if pool.ready_current < pool.wanted]
    if observed.troubles:
        return Verdict(False, observed.troubles[0].reason, "; ".join(it.message for it in observed.troubles[:4]))
    if observed.stuck:
        return Verdict(False, "ProgressDeadlineExceeded", observed.stuck)
    if short:
        counts = ", ".join(f"pool {pool.name}: {pool.ready_current} of {pool.wanted} are ready" for pool in short)
        return Verdict(False, "Starting", counts)
    if not observed.pools:
        return Verdict(False, "NothingStarted", "no replica was started")
    return Verdict(True, "AllReady", f"{observed.wanted} of {observed.wanted} replicas ready")
