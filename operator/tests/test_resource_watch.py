"""The users' resources against a server that forgets where watches were."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient, Configuration

from penstock.kube.caches import Caches
from penstock.operator.api import MODELS
from penstock.operator.handlers import ResourceWatch
from penstock.operator.store import Key, Resources

EXPIRED = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}


class Server:
    """Lists its models in pages of one; the first page, or a watch, may be the last thing that it answers."""

    def __init__(self, *models: dict[str, Any]) -> None:
        self.models = list(models)
        self.refused: set[str] = set()
        """What is answered with 410, once: `watch`, `event` (in a watch that had begun), `page` (another than the first)."""
        self.watched = 0
        self.changed = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        if "watch" not in query:
            return self._refusal("page") if "continue" in query and "page" in self.refused else self._page(query)
        if "watch" in self.refused:
            return self._refusal("watch")
        self.watched += 1
        response = web.StreamResponse()
        await response.prepare(request)
        await self.changed.wait()
        self.changed.clear()
        if "event" in self.refused:
            self.refused.discard("event")
            await response.write(json.dumps({"type": "ERROR", "object": EXPIRED}).encode() + b"\n")
        return response

    def _refusal(self, what: str) -> web.Response:
        self.refused.discard(what)
        return web.json_response(EXPIRED, status=410)

    def _page(self, query: Any) -> web.Response:
        at = int(query.get("continue", 0))
        left = str(at + 1) if at + 1 < len(self.models) else ""
        head = {"kind": "InferenceModelList", "apiVersion": "penstock.dev/v1alpha1"}
        metadata = {"resourceVersion": "100", "continue": left}
        return web.json_response({**head, "metadata": metadata, "items": self.models[at : at + 1]})


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def named(make: Any, *names: str) -> list[dict[str, Any]]:
    made = [make.resource(name=name, served={"name": "shared"}) for name in names]
    for age, resource in enumerate(made):
        resource["metadata"]["creationTimestamp"] = f"2026-01-0{age + 1}T00:00:00Z"
    return made


@pytest.fixture
async def watched(make: Any) -> AsyncIterator[tuple[Server, Resources, list[Key]]]:
    """Three models that want one name, and what the operator knows of them."""
    server = Server(*named(make, "oldest", "middle", "youngest"))
    app = web.Application()
    app.router.add_get("/{path:.*}", server.answer)
    resources, changed = Resources(), list[Key]()
    async with TestServer(app) as place, ApiClient(Configuration(host=str(place.make_url("")).rstrip("/"))) as api:
        cache = Caches(api, MODELS, [])
        ResourceWatch(resources, changed.append).follow(cache)
        task = asyncio.create_task(cache.run())
        await asyncio.wait_for(cache.synced(), 60)
        await until(lambda: server.watched)
        yield server, resources, changed
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("refused", [{"event"}, {"event", "page"}, {"watch", "event"}])
async def test_what_went_while_nothing_was_heard_is_known_with_the_next_list(
    watched: tuple[Server, Resources, list[Key]], refused: set[str]
) -> None:
    server, resources, changed = watched
    middle = Key("InferenceModel", "default", "middle")
    assert resources.conflict(middle)
    changed.clear()
    server.models = server.models[1:]  # no watch tells of it
    server.refused = set(refused)
    server.changed.set()
    await until(lambda: len(resources.known()) == 2)
    assert not resources.conflict(middle), "the name is free"
    assert middle in changed
    assert not server.refused or server.refused == {"watch"}
    await until(lambda: server.watched == 2)
