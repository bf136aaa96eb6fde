"""`Degraded`: something is wrong, whether or not the model serves."""

from penstock.operator.conditions.cause import cause as cause_of
from penstock.operator.conditions.verdict import Verdict
from penstock.operator.observed import Observed


def judge(observed: Observed) -> Verdict:
    reason, cause = cause_of(observed)
    return Verdict(True, reason, cause) if cause else Verdict(False, "AsExpected", "nothing is wrong with the replicas")
