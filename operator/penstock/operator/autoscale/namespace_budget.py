"""Budgets that the models of a namespace share. Pure."""

from collections.abc import Mapping
from typing import Final


class NamespaceBudgets:
    """What each namespace's budget leaves to each of its models.

    A model may use what the other models of its namespace do not cost. So no model shrinks because another one grows, and the
    first that needs a replica gets it. Models are called `namespace/name`.

    Args:
        budgets: By namespace, in the unit of `pools[].cost`; a namespace that is missing has no limit.
    """

    def __init__(self, budgets: Mapping[str, float]) -> None:
        self._budgets: Final = budgets
        self._spent: dict[str, float] = {}

    def begin(self, spent: Mapping[str, float]) -> None:
        """Begin a look at all models.

        Args:
            spent: What the replicas of each model cost that the autoscaler sizes.
        """
        self._spent = dict(spent)

    def room(self, model: str) -> float | None:
        """What the model's replicas may cost together; None: there is no limit."""
        namespace = model.partition("/")[0]
        if namespace not in self._budgets:
            return None
        others = sum(cost for other, cost in self._spent.items() if other != model and other.partition("/")[0] == namespace)
        return max(self._budgets[namespace] - others, 0.0)

    def spend(self, model: str, cost: float) -> None:
        """Take note of what a model's replicas cost from now on."""
        self._spent[model] = cost
