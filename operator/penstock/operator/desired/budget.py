"""The pool's PodDisruptionBudget."""

from typing import Any

from penstock.api.resources import InferenceModel, Pool
from penstock.operator.desired.names import metadata, selector

Object = dict[str, Any]


def disruption_budget(model: InferenceModel, pool: Pool) -> Object:
    """Node drains take one replica at a time. For a single one there is none, since it would block a drain for ever."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(model, pool),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": selector(model, pool)}},
    }
