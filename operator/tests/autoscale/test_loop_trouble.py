"""What goes wrong with one model of several."""

import asyncio
from collections.abc import Sequence

import pytest

from penstock.operator.autoscale import loop
from penstock.operator.autoscale.limits import Limits, ModelLimits, Settings
from penstock.operator.autoscale.loop import Autoscaler, ModelScale, PoolScale, Record
from penstock.operator.replicas import Replicas


class Models:
    """Three models; the second cannot be written down, and the third can not even be scaled."""

    def __init__(self) -> None:
        self.scaled: list[tuple[str, int]] = []
        self.told: list[str] = []

    async def targets(self) -> Sequence[ModelScale]:
        limits = ModelLimits({"main": Limits(min_replicas=2, max_replicas=4)})
        return [ModelScale(f"ns/{name}", limits, {"main": PoolScale(1, ())}) for name in ("c", "b", "a")]

    async def scale(self, pool_id: str, replicas: int, victims: Sequence[str]) -> None:
        if pool_id == "ns/c/main":
            raise ConnectionError("the API server is gone")
        self.scaled.append((pool_id, replicas))

    async def spare(self, pool_id: str) -> None:
        raise AssertionError("each of them grows")

    async def record(self, record: Record) -> None:
        if record.pool_id == "ns/b/main":
            raise RuntimeError("a bug")
        self.told.append(record.pool_id)


async def test_one_models_failure_keeps_no_other_from_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "AT_ONCE", 1)
    models = Models()

    async def nobody() -> Sequence[str]:
        return []

    task = asyncio.create_task(Autoscaler(nobody, Replicas(), models, Settings(), tick_s=60).run())
    async with asyncio.timeout(60):
        while not models.told:
            await asyncio.sleep(0.01)
    task.cancel()
    assert models.scaled == [("ns/b/main", 2), ("ns/a/main", 2)]
    assert models.told == ["ns/a/main"]
