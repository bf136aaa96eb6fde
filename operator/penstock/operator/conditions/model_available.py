"""`ModelAvailable`: the weights are there, and an engine has loaded them."""

from penstock.operator.conditions.verdict import Verdict
from penstock.operator.observed import Observed


def judge(observed: Observed) -> Verdict:
    if observed.fetching is not None:
        return Verdict(False if observed.fetching.failed else None, observed.fetching.reason, observed.fetching.message)
    if any(pool.ready_current for pool in observed.pools):
        return Verdict(True, "Loaded", "the engine has loaded the model")
    died = [it for it in observed.troubles if it.exited]
    if died:
        return Verdict(False, "EngineExited", died[0].message)
    return Verdict(None, "NotLoadedYet", "no replica of this revision has loaded the model yet")
