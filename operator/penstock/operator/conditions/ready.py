"""`Ready`: the present generation serves."""

from penstock.operator.conditions import routed
from penstock.operator.conditions.cause import cause as cause_of
from penstock.operator.conditions.verdict import Verdict, plural
from penstock.operator.observed import Observed


def judge(observed: Observed) -> Verdict:
    """Whether the present generation serves. Replicas of an older one may serve all the while: that is `Serving`."""
    still = f"; {plural(observed.ready)} of the last good revision still serve" if observed.ready else ""
    if observed.refusal is not None:
        return Verdict(False, observed.refusal.reason, observed.refusal.message + still)
    if observed.conflict:
        return Verdict(False, "NameConflict", observed.conflict)
    if observed.fetching is not None:
        return Verdict(False, observed.fetching.reason, observed.fetching.message + still)
    if observed.zero:
        return Verdict(True, "ScaledToZero", "no replica is wanted, and none serves")
    waiting = [pool for pool in observed.pools if pool.wanted > 0 and pool.ready_current == 0]
    if observed.rolling and observed.ready:
        reason, cause = cause_of(observed)
        if observed.blocked:
            return Verdict(False, reason, cause + still)
        if cause:
            return Verdict(False, "NewRevisionFails", f"{cause} ({reason}); {plural(observed.ready)} still serve")
        return Verdict(None, "Paused" if observed.paused else "RollingOut", f"an older revision is being replaced{still}")
    if waiting or not observed.pools:
        reason, cause = cause_of(observed)
        return Verdict(False, reason or "Starting", cause or "no replica is ready yet")
    reached = routed.judge(observed)
    if reached.status is False:  # where nobody can say, clients may reach it all the same
        return Verdict(False, reached.reason, reached.message)
    return Verdict(True, "Serving", f"{observed.ready} of {observed.wanted} replicas ready")
