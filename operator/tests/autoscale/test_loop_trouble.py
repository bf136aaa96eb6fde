"""What goes wrong with one model of several, and with one gateway of several."""

import asyncio
from collections.abc import Sequence

import httpx
import msgspec
import pytest

from penstock.api.fleet import PoolsView
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


class Gateways:
    """One that refuses connections, one that answers at once, and one that waits for something to tell."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.patience_s: dict[str, float] = {}
        self.news = asyncio.Event()

    async def answer(self, request: httpx.Request) -> httpx.Response:
        name, waits = request.url.host, float(request.url.params["timeout"]) > 0
        self.asked.append(f"{name} {'waits' if waits else 'now'}")
        self.patience_s[self.asked[-1]] = request.extensions["timeout"]["connect"]
        if name == "dead":
            raise httpx.ConnectError("connection refused")
        if name == "quiet" and waits:
            await self.news.wait()
        return httpx.Response(200, content=msgspec.json.encode(PoolsView(gateway=name, version=1, pools=[])))

    async def views(self, *names: str) -> list[str]:
        async def urls() -> Sequence[str]:
            return [f"http://{name}" for name in names]

        async with httpx.AsyncClient(transport=httpx.MockTransport(self.answer)) as client:
            views = await Autoscaler(urls, Replicas(), Models(), Settings(), tick_s=60)._views(client)
        return sorted(view.gateway for view in views)


async def test_a_gateway_that_does_not_answer_makes_nobody_look_more_often() -> None:
    gateways = Gateways()
    look = asyncio.create_task(gateways.views("dead", "quiet"))
    async with asyncio.timeout(60):
        while len(gateways.asked) < 2:
            await asyncio.sleep(0.01)
        gateways.news.set()
        assert await look == ["quiet"]
    assert sorted(gateways.asked) == ["dead waits", "quiet waits"], "the other one is not interrupted"
    assert await gateways.views("dead") == []


async def test_one_that_has_news_does_not_wait_for_the_others() -> None:
    gateways = Gateways()
    async with asyncio.timeout(60):
        assert await gateways.views("urgent", "quiet") == ["quiet", "urgent"]
    assert sorted(gateways.asked) == ["quiet now", "quiet waits", "urgent waits"]
    assert gateways.patience_s["quiet now"] < 10 < gateways.patience_s["quiet waits"], "one may be gone without a word"
