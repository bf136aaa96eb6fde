"""The pool's PodDisruptionBudget."""

from penstock.api.resources import InferenceModel, Pool
from penstock.operator.desired.devices import nodes
from penstock.operator.desired.names import GROUPS_OF, child_name, metadata, selector
from penstock.operator.desired.size import may_surge, size
from penstock.operator.objects import Object


def disruption_budget(model: InferenceModel, pool: Pool, *, surge: bool = False) -> Object | None:
    """Let node drains take one replica at a time. A single replica has no budget, since that would block a drain for ever.

    Where replicas span nodes, the budget counts workers too: a group that loses one of its pods is down as a whole.

    Args:
        surge: The operator starts another replica when the single one's node is drained. Then one must always be there.
    """
    if may_surge(model, pool):
        bound: Object = {"minAvailable": 1}
        if not surge:
            return None
    else:
        wanted = size(model, pool)
        bound = {"maxUnavailable": 1}
        if wanted.owner == "spec" and wanted.initial <= 1:
            return None
    chosen = selector(model, pool) if nodes(pool) == 1 else {GROUPS_OF: child_name(model.metadata.name, pool.name)}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(model, pool),
        "spec": {**bound, "selector": {"matchLabels": chosen}},
    }
