"""A budget that the models of a namespace share."""

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from penstock.operator.autoscale.limits import Limits, ModelLimits, Settings
from penstock.operator.autoscale.loop import Autoscaler, ModelScale, PoolScale, Record
from penstock.operator.autoscale.namespace_budget import NamespaceBudgets
from penstock.operator.replicas import Replicas


def test_a_model_has_what_the_others_of_its_namespace_do_not_cost() -> None:
    budgets = NamespaceBudgets({"a": 100})
    budgets.begin({"a/x": 30, "a/y": 50, "b/z": 1000})
    assert (budgets.room("a/x"), budgets.room("a/y"), budgets.room("a/new"), budgets.room("b/z")) == (50, 70, 20, None)
    budgets.spend("a/x", 50)
    assert budgets.room("a/y") == 50
    budgets.spend("a/y", 300)
    assert budgets.room("a/x") == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99)), max_size=20), st.integers(0, 300))
def test_models_that_keep_to_their_room_never_exceed_the_budget(wishes: list[tuple[int, int]], budget: int) -> None:
    budgets = NamespaceBudgets({"a": budget})
    budgets.begin({})
    spent: dict[str, float] = {}
    for number, wish in wishes:
        model = f"a/{number}"
        room = budgets.room(model)
        assert room is not None
        spent[model] = min(wish, room)
        budgets.spend(model, spent[model])
    assert sum(spent.values()) <= budget


class Fleet:
    """Models of two namespaces; each wants four replicas."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.reasons: dict[str, str] = {}

    async def targets(self) -> Sequence[ModelScale]:
        limits = ModelLimits({"main": Limits(min_replicas=1, max_replicas=9, warm=3, cost=10)})
        return [ModelScale(name, limits, {"main": PoolScale(size, ())}) for name, size in self.sizes.items()]

    async def scale(self, pool_id: str, replicas: int, victims: Sequence[str]) -> None:
        self.sizes[pool_id.removesuffix("/main")] = replicas

    async def spare(self, pool_id: str) -> None:
        pass

    async def record(self, record: Record) -> None:
        self.reasons[record.pool_id.removesuffix("/main")] = f"{record.decision.constraint}: {record.decision.reason}"


async def test_the_autoscaler_keeps_a_namespace_to_its_budget_and_says_so() -> None:
    fleet = Fleet({"a/x": 1, "a/y": 1, "b/z": 1})

    async def nobody() -> Sequence[str]:
        return []

    scaler = Autoscaler(nobody, Replicas(), fleet, Settings(), tick_s=0.01, budgets={"a": 60})
    task = asyncio.create_task(scaler.run())
    async with asyncio.timeout(60):
        while fleet.sizes["b/z"] < 4 or sum(size for name, size in fleet.sizes.items() if name.startswith("a/")) < 6:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
    task.cancel()
    assert fleet.sizes["a/x"] + fleet.sizes["a/y"] == 6
    assert fleet.sizes["b/z"] == 4
    assert any("Budget" in it and "the namespace's budget leaves this model" in it for it in fleet.reasons.values())
