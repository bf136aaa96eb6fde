"""`Progressing`: a rollout, or a start, goes on."""

from penstock.operator.conditions.verdict import Verdict
from penstock.operator.observed import Observed


def judge(observed: Observed) -> Verdict:
    if observed.refusal is not None:
        return Verdict(False, observed.refusal.reason, "nothing is changed until the spec is accepted")
    if observed.fetching is not None:
        return Verdict(not observed.fetching.failed, observed.fetching.reason, "replicas start when the model is there")
    if observed.blocked:
        return Verdict(False, "RolloutBlocked", observed.blocked)
    if observed.stuck:
        return Verdict(False, "ProgressDeadlineExceeded", observed.stuck)
    if observed.rolling:
        if observed.paused:
            return Verdict(False, "Paused", "spec.rollout.paused is true")
        return Verdict(True, "RollingOut", "replicas of an older revision are being replaced")
    moving = [pool.name for pool in observed.pools if pool.moving]
    if moving:
        words = f"the node of the only replica of pool {', '.join(moving)} is drained: another one starts first"
        return Verdict(True, "MovingReplica", words)
    if any(pool.workload is None or pool.ready_current < pool.wanted for pool in observed.pools):
        return Verdict(True, "Starting", "replicas are starting")
    return Verdict(False, "Complete", "all replicas run this generation")
