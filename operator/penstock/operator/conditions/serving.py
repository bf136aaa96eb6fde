"""`Serving`: replicas of any revision take requests."""

from penstock.operator.conditions.verdict import Verdict, plural
from penstock.operator.observed import Observed


def judge(observed: Observed) -> Verdict:
    if observed.ready:
        return Verdict(True, "ReplicasReady", f"{plural(observed.ready)} take requests")
    if observed.zero and observed.refusal is None:
        return Verdict(False, "ScaledToZero", "no replica is wanted")
    return Verdict(False, "NoReadyReplica", "no replica takes requests")
