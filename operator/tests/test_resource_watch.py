"""The users' resources through kopf, against a server that forgets where watches were, refuses or speaks nonsense."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient, Configuration

from penstock.operator.api import ADAPTERS, MODELS
from penstock.operator.handlers import ResourceWatch
from penstock.operator.store import Key, Resources, key_of
from penstock.operator.users import Users

Object = dict[str, Any]
GROUP, VERSION = MODELS.group, MODELS.version


def refusal(status: int) -> Object:
    return {"kind": "Status", "code": status, "reason": "AFault", "message": "a fault"}


class Server:
    """Models in pages of one, no adapters, and the discovery that kopf needs."""

    def __init__(self, *models: Object) -> None:
        self.models = list(models)
        self.version = 100
        self.kinds = [("InferenceModel", MODELS), ("LoraAdapter", ADAPTERS)]
        self.faults: dict[str, int | bytes] = {}
        """Answered once by `watch`, `event` (in a watch that has begun) or `page` (not the first): a status, or a line."""
        self.watched = 0
        """Watches of models that have begun."""
        self.writes: list[str] = []
        self.tokens: list[str] = []
        """Of watches of models."""
        self.changed = asyncio.Event()
        self.events: list[Object] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.method != "GET":
            self.writes.append(f"{request.method} {request.path}")
            return web.json_response({})
        match request.path:
            case "/api":
                return web.json_response({"versions": ["v1"]})
            case "/api/v1":
                names = [("Namespace", "namespaces"), ("Event", "events")]
                return web.json_response({"resources": [self._resource(*name) for name in names]})
            case "/apis":
                groups = [(GROUP, VERSION), ("apiextensions.k8s.io", "v1")]
                return web.json_response({"groups": [self._group(*group) for group in groups]})
            case "/apis/apiextensions.k8s.io/v1":
                return web.json_response({"resources": [self._resource("CustomResourceDefinition", "customresourcedefinitions")]})
            case path if path == f"/apis/{GROUP}/{VERSION}":
                return web.json_response({"resources": [self._resource(kind, it.plural) for kind, it in self.kinds]})
            case path if path not in [it.path(None) for _, it in self.kinds]:
                return web.json_response(refusal(404), status=404)
            case path:
                return await self._collection(request, self.models if path == MODELS.path(None) else [])

    @staticmethod
    def _resource(kind: str, plural: str) -> Object:
        return {
            "kind": kind,
            "name": plural,
            "singularName": kind.lower(),
            "namespaced": True,
            "verbs": ["list", "watch", "patch"],
        }

    @staticmethod
    def _group(name: str, version: str) -> Object:
        return {"name": name, "versions": [{"version": version}], "preferredVersion": {"version": version}}

    async def _collection(self, request: web.Request, objects: list[Object]) -> web.StreamResponse:
        query = request.query
        if "watch" not in query:
            return self._refusal("page") if "continue" in query and "page" in self.faults else self._page(query, objects)
        if request.path != MODELS.path(None):
            await asyncio.Event().wait()  # without a first byte: kopf does not end by itself then
        self.tokens.append(request.headers.get("Authorization", ""))
        if "watch" in self.faults:
            return self._refusal("watch")
        response = web.StreamResponse()
        await response.prepare(request)
        self.watched += 1
        while True:
            await self.changed.wait()
            self.changed.clear()
            for event in self.events:
                await response.write(json.dumps(event).encode() + b"\n")
            self.events.clear()
            match self.faults.pop("event", None):
                case int(status):
                    await response.write(json.dumps({"type": "ERROR", "object": refusal(status)}).encode() + b"\n")
                    return response
                case bytes(line):
                    await response.write(line)
                    return response
                case None:
                    pass

    def _refusal(self, what: str) -> web.Response:
        status = self.faults.pop(what)
        assert isinstance(status, int)
        return web.json_response(refusal(status), status=status)

    def _page(self, query: Any, objects: list[Object]) -> web.Response:
        at = int(query.get("continue", 0))
        left = str(at + 1) if at + 1 < len(objects) else ""
        head = {"kind": "InferenceModelList", "apiVersion": f"{GROUP}/{VERSION}"}
        metadata = {"resourceVersion": str(self.version), "continue": left}
        return web.json_response({**head, "metadata": metadata, "items": objects[at : at + 1]})

    def tell(self, kind: str, model: Object) -> None:
        """An event in the watch that is open."""
        self.events.append({"type": kind, "object": model})
        self.changed.set()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def named(make: Any, *names: str) -> list[Object]:
    made = [make.resource(name=name, served={"name": "shared"}) for name in names]
    for age, resource in enumerate(made):
        resource["metadata"]["creationTimestamp"] = f"2026-01-0{age + 1}T00:00:00Z"
    return made


class Watched:
    """A server, and what the operator knows of it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.resources, self.changed = Resources(), list[Key]()
        self.users: Users

    def names(self) -> set[str]:
        return {key.name for key in self.resources.known()}


@asynccontextmanager
async def watching(server: Server, sweep_s: float = 3600.0) -> AsyncIterator[Watched]:
    it = Watched(server)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    async with TestServer(app, shutdown_timeout=0.1) as place:
        configuration = Configuration(host=str(place.make_url("")).rstrip("/"), api_key={"BearerToken": "a-token"})
        configuration.api_key_prefix = {"BearerToken": "Bearer"}
        async with ApiClient(configuration) as api:
            it.users = Users(api, ResourceWatch(it.resources, it.changed.append), [], sweep_s=sweep_s)
            task = asyncio.create_task(it.users.run())
            try:
                yield it
            finally:
                task.cancel()
                await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 60)


@pytest.mark.parametrize(
    "faults",
    [
        {"event": 410},
        {"event": 410, "page": 410},
        {"event": 410, "watch": 410},
        {"event": 410, "watch": 404},
        {"event": 410, "watch": 401},
        {"event": 500},
        {"event": b'{"type": "MODI\n'},
    ],
    ids=str,
)
async def test_what_went_while_nothing_was_heard_is_soon_known(make: Any, faults: dict[str, int | bytes]) -> None:
    async with watching(Server(*named(make, "oldest", "middle", "youngest"))) as it:
        server, middle = it.server, Key("InferenceModel", "default", "middle")
        await until(lambda: server.watched)
        assert it.resources.conflict(middle)
        it.changed.clear()
        server.models = server.models[1:]  # no watch tells of it
        server.faults = dict(faults)
        server.changed.set()
        await until(lambda: len(it.resources.known()) == 2)
        assert not it.resources.conflict(middle), "the name is free"
        assert middle in it.changed
        await until(lambda: server.watched >= 2)
        newer = {**server.models[0], "metadata": {**server.models[0]["metadata"], "resourceVersion": "101"}}
        it.changed.clear()
        server.tell("MODIFIED", newer)
        await until(lambda: middle in it.changed)
        assert not server.faults
        assert set(server.tokens) == {"Bearer a-token"}
        assert not server.writes, "nothing is written on users' objects"


async def test_however_often_a_life_of_kopf_is_cancelled_its_thread_has_ended_with_it(make: Any) -> None:
    """As when an event loop ends: it cancels every task, those that clean up among them."""
    server = Server(*named(make, "only"))
    async with watching(server):
        await until(lambda: server.watched)
        for _ in range(3):
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0.05)
    await asyncio.wait_for(asyncio.get_running_loop().shutdown_default_executor(), 30)


async def test_the_end_of_the_last_object_is_known_after_a_minute_at_most(make: Any) -> None:
    async with watching(Server(*named(make, "only")), sweep_s=0.5) as it:
        await until(lambda: it.server.watched)
        it.server.models = []
        await until(lambda: not it.resources.known())


async def test_a_kind_that_comes_later_is_watched(make: Any) -> None:
    server = Server(*named(make, "first"))
    server.kinds = server.kinds[1:]
    async with watching(server) as it:
        await asyncio.wait_for(it.users.known.wait(), 60)
        assert it.users.absent == {"InferenceModel"}
        server.kinds = [("InferenceModel", MODELS), ("LoraAdapter", ADAPTERS)]
        await until(lambda: server.watched)
        assert it.names() == {"first"}
        assert not it.users.absent


def versioned(resource: Object, version: int, uid: str = "") -> Object:
    meta = resource["metadata"]
    return {**resource, "metadata": {**meta, "resourceVersion": str(version), "uid": uid or meta["uid"]}}


async def test_a_list_knows_what_is_newer_than_itself(make: Any) -> None:
    resources = Resources()
    watch = ResourceWatch(resources, lambda key: None)
    old, new, gone = (versioned(make.resource(name), version) for name, version in (("old", 5), ("new", 12), ("gone", 6)))
    for one in (old, gone):
        watch.heard(None, one)
    newest = watch.newest("InferenceModel", None)
    watch.heard("ADDED", new)
    watch.heard("DELETED", gone)
    watch.listed("InferenceModel", None, [gone], 10, newest)
    assert resources.known() == [key_of(new)], "what came after the list stays, and what went after it stays away"


async def test_events_of_two_objects_of_a_name_may_come_in_any_order(make: Any) -> None:
    resources = Resources()
    watch = ResourceWatch(resources, lambda key: None)
    first, second = versioned(make.resource(), 5, "uid-1"), versioned(make.resource(), 8, "uid-2")
    watch.heard("ADDED", second)
    watch.heard("MODIFIED", versioned(first, 6))
    watch.heard("DELETED", versioned(first, 7))
    assert resources.get(key_of(second)) == second


async def test_an_earlier_state_of_the_store_replaces_the_later_one(make: Any) -> None:
    """etcd was restored from a backup: versions begin lower."""
    resources, changed = Resources(), list[Key]()
    watch = ResourceWatch(resources, changed.append)
    kept, lost = versioned(make.resource("kept"), 50), versioned(make.resource("lost"), 60)
    for one in (kept, lost):
        watch.heard("ADDED", one)
    newest = watch.newest("InferenceModel", None)
    changed.clear()
    watch.listed("InferenceModel", None, [versioned(kept, 20)], 30, newest)
    assert resources.known() == [key_of(kept)]
    found = resources.get(key_of(kept))
    assert found is not None and found["metadata"]["resourceVersion"] == "20"
    assert set(changed) == {key_of(kept), key_of(lost)}
