"""`CanaryPassed`: the judgement of a canary; absent for a model that is not judged."""

from penstock.operator.conditions.verdict import Verdict
from penstock.operator.observed import Observed


def judge(observed: Observed) -> Verdict | None:
    canary = observed.canary
    if canary is None:
        return None
    if canary.verdict == "Judging":
        return Verdict(None, "Judging", canary.reason)
    return Verdict(canary.verdict == "Passed", f"Canary{canary.verdict}", canary.reason)
