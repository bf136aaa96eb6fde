"""`Routed`: the gateways send the model's requests to its replicas."""

from penstock.operator.conditions.verdict import Verdict
from penstock.operator.observed import Observed


def judge(observed: Observed) -> Verdict:
    if observed.conflict:
        return Verdict(False, "NameConflict", observed.conflict)
    if not observed.served_name:
        return Verdict(None, "NotRead", "the spec could not be read")
    return Verdict(*observed.routing.verdict(observed.served_name))
