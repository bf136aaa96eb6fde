"""The pool's PodDisruptionBudget."""

from typing import Any

from penstock.api.resources import InferenceModel, Pool
from penstock.operator.desired.devices import nodes
from penstock.operator.desired.names import GROUPS_OF, child_name, metadata, selector

Object = dict[str, Any]


def disruption_budget(model: InferenceModel, pool: Pool) -> Object:
    """Node drains take one replica at a time. For a single one there is none, since it would block a drain for ever.

    Where replicas span nodes, the budget counts workers too: a group that loses one of its pods is down as a whole.
    """
    chosen = selector(model, pool) if nodes(pool) == 1 else {GROUPS_OF: child_name(model.metadata.name, pool.name)}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(model, pool),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": chosen}},
    }
