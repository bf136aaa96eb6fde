"""`ScalingActive`: the autoscaler sizes the pools."""

from penstock.operator.conditions.verdict import Verdict
from penstock.operator.observed import Observed


def judge(observed: Observed) -> Verdict:
    others = [it for it in (observed.other, *(pool.other for pool in observed.pools)) if it is not None]
    if any(it.remedy for it in others):
        words = "; ".join(f"{it.says}, but {it.remedy}" for it in others if it.remedy)
        return Verdict(False, "AutoscalerConflict", words)
    scaled = [pool for pool in observed.pools if pool.scaled]
    if not scaled and others:
        return Verdict(False, "OtherAutoscaler", "; ".join(it.says for it in others))
    if not scaled:
        return Verdict(False, "NotConfigured", "no pool has scaling")
    silent = [pool.name for pool in scaled if pool.scaling is None]
    if silent:
        return Verdict(None, "NoReport", f"the autoscaler has not reported yet on pool {', '.join(silent)}")
    reports = [(pool.name, pool.scaling) for pool in scaled if pool.scaling is not None]
    idle = [(name, report) for name, report in reports if report.idle]
    if idle:
        return Verdict(False, idle[0][1].idle, "; ".join(f"pool {name}: {report.reason}" for name, report in idle))
    ignored = [(name, report) for name, report in reports if report.out_of_reach]
    if ignored:
        return Verdict(True, "GoalOutOfReach", "; ".join(f"pool {name}: {report.out_of_reach}" for name, report in ignored))
    return Verdict(
        True, "Scaling", "; ".join(f"pool {name}: {report.desired} wanted ({report.constraint})" for name, report in reports)
    )
