"""`Accepted`: the spec can be honoured."""

from penstock.operator.conditions.verdict import Verdict
from penstock.operator.observed import Observed


def judge(observed: Observed) -> Verdict:
    if observed.refusal is not None:
        return Verdict(False, observed.refusal.reason, observed.refusal.message)
    return Verdict(True, "Accepted", "every field of the spec is honoured")
