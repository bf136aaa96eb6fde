"""CRDs that are not installed: one question for all that wait for them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient, Configuration

from penstock.kube.caches import Caches
from penstock.kube.client import Resource
from penstock.kube.groups import Groups


class Server:
    """Serves no objects of any group in `groups`, and 404 for others."""

    def __init__(self) -> None:
        self.groups: set[str] = {"apps"}
        self.asked: Counter[str] = Counter()

    async def answer(self, request: web.Request) -> web.Response:
        self.asked[request.path] += 1
        if request.path == "/apis":
            return web.json_response({"groups": [{"name": name} for name in self.groups]})
        if request.path.split("/")[2] not in self.groups:
            return web.Response(status=404)
        if "watch" in request.query:
            await asyncio.sleep(30)
        return web.json_response({"kind": "List", "metadata": {"resourceVersion": "1"}, "items": []})


@pytest.fixture
async def api() -> AsyncIterator[tuple[Server, ApiClient]]:
    its, app = Server(), web.Application()
    app.router.add_route("GET", "/{path:.*}", its.answer)
    async with TestServer(app) as server, ApiClient(Configuration(host=str(server.make_url("")).rstrip("/"))) as client:
        yield its, client


async def test_while_a_group_is_not_there_nothing_of_it_is_listed(
    api: tuple[Server, ApiClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.kube.cache.ABSENT_S", 0.02)
    server, client = api
    groups = Groups(client, fresh_s=0.01)
    kinds = [Resource(f"{name}.example.com", "v1", "things") for name in ("a", "b")]
    caches = [Caches(client, kind, ["one", "two"], optional=groups) for kind in kinds]
    tasks = [asyncio.create_task(cache.run()) for cache in caches]
    async with asyncio.timeout(60):
        for cache in caches:
            await cache.synced()
        while server.asked["/apis"] < 5:
            await asyncio.sleep(0.01)
        assert {path: count for path, count in server.asked.items() if path != "/apis"} == {
            f"{kind.path(namespace)}": 1 for kind in kinds for namespace in ("one", "two")
        }
        assert all(cache.absent for cache in caches)
        server.groups.add("a.example.com")
        while caches[0].absent:
            await asyncio.sleep(0.01)
    assert caches[1].absent and server.asked[kinds[1].path("one")] == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_answer_is_for_all_who_ask_meanwhile_and_none_is_no_verdict(api: tuple[Server, ApiClient]) -> None:
    server, client = api
    groups = Groups(client)
    assert await asyncio.gather(*(groups.may_have(name) for name in ("apps", "batch", "apps"))) == [True, False, True]
    assert server.asked["/apis"] == 1
    async with ApiClient(Configuration(host="http://127.0.0.1:9")) as nobody:
        assert await Groups(nobody).may_have("apps")
