"""The list-watch cache against a small API server that can be made to misbehave."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient, Configuration

from penstock.kube.backoff import Backoff
from penstock.kube.cache import Cache, Change
from penstock.kube.client import PODS, Resource
from penstock.kube.groups import Groups

Object = dict[str, Any]


class FakeApi:
    """Lists and watches of pods: `objects` now, `log` of events by resource version, and switches for trouble."""

    def __init__(self) -> None:
        self.version = 10
        self.objects: dict[str, Object] = {}
        self.log: list[tuple[int, str, Object]] = []
        self.oldest = 0  # watches from before it are answered 410
        self.down = False
        self.refusal, self.said = 500, dict[str, str]()
        self.refused: list[float] = []
        self.lists: list[dict[str, str]] = []
        self.watches: list[dict[str, str]] = []
        self.changed = asyncio.Condition()
        self.page = 2
        self.page_refusals: list[int] = []
        """Of pages that are not the first."""
        self.cut = asyncio.Event()

    async def emit(self, kind: str, name: str, uid: str = "", **extra: Any) -> None:
        self.version += 1
        metadata = {"namespace": "ns", "name": name, "uid": uid or name, "resourceVersion": str(self.version)}
        item = {"metadata": {**metadata, "managedFields": [{"manager": "x"}]}, **extra}
        if kind == "DELETED":
            self.objects.pop(name, None)
        elif kind != "BOOKMARK":
            self.objects[name] = item
        self.log.append((self.version, kind, item))
        async with self.changed:
            self.changed.notify_all()

    async def pods(self, request: web.Request) -> web.StreamResponse:
        if self.down:
            self.refused.append(time.monotonic())
            return web.json_response({"kind": "Status", "reason": "InternalError"}, status=self.refusal, headers=self.said)
        query = dict(request.query)
        if query.get("limit") == "1":  # for its version
            return self._list(query)
        if query.get("watch") != "true":
            self.lists.append(query)
            if "continue" in query and self.page_refusals:
                return web.json_response({"kind": "Status"}, status=self.page_refusals.pop(0))
            return self._list(query)
        self.watches.append(query)
        return await self._watch(request, int(query["resourceVersion"]))

    def _list(self, query: dict[str, str]) -> web.Response:
        start = int(query.get("continue", 0))
        items = list(self.objects.values())[start : start + self.page]
        token = str(start + self.page) if start + self.page < len(self.objects) else ""
        metadata = {"resourceVersion": str(self.version), "continue": token}
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items})

    async def _watch(self, request: web.Request, version: int) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        if version < self.oldest:
            status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
            await response.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
            return response
        while not self.cut.is_set():
            for at, kind, item in [entry for entry in self.log if entry[0] > version]:
                await response.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")
                version = at
            async with self.changed:
                await self.changed.wait()
        return response

    async def hang_up(self) -> None:
        self.cut.set()
        async with self.changed:
            self.changed.notify_all()
        await asyncio.sleep(0.02)
        self.cut.clear()


@pytest.fixture
async def api() -> AsyncIterator[tuple[FakeApi, ApiClient]]:
    fake = FakeApi()
    app = web.Application()
    app.router.add_get("/api/v1/pods", fake.pods)
    server = TestServer(app)
    await server.start_server()
    async with ApiClient(Configuration(host=str(server.make_url("")).rstrip("/"))) as client:
        yield fake, client
    await fake.hang_up()
    await server.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
async def cached(api: tuple[FakeApi, ApiClient]) -> AsyncIterator[tuple[FakeApi, Cache, list[Change]]]:
    fake, client = api
    for name in ("a", "b", "c"):
        await fake.emit("ADDED", name)
    cache = Cache(client, PODS, label_selector="penstock.dev/model", backoff=Backoff(first=0.01, longest=0.05))
    changes: list[Change] = []
    cache.subscribe(changes.append)
    task = asyncio.create_task(cache.run())
    await asyncio.wait_for(cache.synced.wait(), 60)
    yield fake, cache, changes
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def names(cache: Cache) -> set[str]:
    return {name for _, name in cache.objects}


@pytest.mark.parametrize(
    ("refusals", "asked"),
    [([], ["", "2"]), ([503], ["", "2", "2"]), ([500, 500], ["", "2", "2", "", "2"]), ([410], ["", "2", "", "2"])],
)
async def test_a_page_that_the_server_cannot_give_is_asked_for_once_more(
    api: tuple[FakeApi, ApiClient], refusals: list[int], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.kube.client.PAGE_PAUSE_S", 0.01)
    fake, connection = api
    for name in ("a", "b", "c"):
        await fake.emit("ADDED", name)
    fake.page_refusals = refusals
    cache = Cache(connection, PODS, backoff=Backoff(first=0.01, longest=0.05))
    task = asyncio.create_task(cache.run())
    await asyncio.wait_for(cache.synced.wait(), 60)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [it.get("continue", "") for it in fake.lists] == asked


async def test_lists_every_page_with_the_selector_and_trims(cached: tuple[FakeApi, Cache, list[Change]]) -> None:
    fake, cache, changes = cached
    assert names(cache) == {"a", "b", "c"}
    assert len(fake.lists) == 2
    assert fake.lists[0]["labelSelector"] == "penstock.dev/model"
    item = cache.objects["ns", "a"]
    assert (item["kind"], item["apiVersion"]) == ("Pod", "v1")
    assert "managedFields" not in item["metadata"]
    assert [(change.key[1], change.old) for change in changes] == [("a", None), ("b", None), ("c", None)]


async def test_follows_changes_and_resumes_where_it_was(cached: tuple[FakeApi, Cache, list[Change]]) -> None:
    fake, cache, changes = cached
    changes.clear()
    await fake.emit("MODIFIED", "a", spec=1)
    await fake.emit("DELETED", "b")
    await until(lambda: len(changes) == 2)
    assert changes[0].old is not None and changes[0].new is not None and changes[0].new["spec"] == 1
    assert changes[1].new is None
    await fake.emit("BOOKMARK", "")
    await until(lambda: cache._version == str(fake.version))
    await fake.hang_up()
    await until(lambda: len(fake.watches) == 2)
    assert fake.watches[1]["resourceVersion"] == str(fake.version), "the bookmark is where the next watch begins"
    assert len(fake.lists) == 2, "a watch that merely ended needs no new list"
    assert names(cache) == {"a", "c"}


async def test_an_expired_version_makes_a_new_list_that_reports_what_was_missed(
    cached: tuple[FakeApi, Cache, list[Change]],
) -> None:
    fake, cache, changes = cached
    changes.clear()
    fake.down = True
    await fake.hang_up()
    await fake.emit("DELETED", "a")
    await fake.emit("MODIFIED", "b", spec=2)
    await fake.emit("ADDED", "c", uid="another")
    fake.oldest = fake.version
    fake.down = False
    await until(lambda: len(changes) >= 4)
    assert names(cache) == {"b", "c"}
    seen = [(change.key[1], change.old is not None, change.new is not None) for change in changes]
    assert seen == [("a", True, False), ("b", True, True), ("c", True, False), ("c", False, True)]


async def test_trouble_never_empties_it(cached: tuple[FakeApi, Cache, list[Change]], caplog: pytest.LogCaptureFixture) -> None:
    fake, cache, _ = cached
    fake.down = True
    await fake.hang_up()
    await until(lambda: len(fake.refused) > 4)
    assert caplog.text.count("500 Internal Server Error") == 1, "it says so once"
    assert names(cache) == {"a", "b", "c"}
    fake.down = False
    await fake.emit("ADDED", "d")
    await until(lambda: "d" in names(cache))


async def test_a_server_that_says_when_is_asked_again_then(cached: tuple[FakeApi, Cache, list[Change]]) -> None:
    fake, _, _ = cached
    fake.refusal, fake.said, fake.down = 429, {"Retry-After": "1"}, True
    await fake.hang_up()
    await until(lambda: len(fake.refused) == 2)
    assert fake.refused[1] - fake.refused[0] >= 1.0
    fake.down = False


async def test_an_optional_resource_may_come_later(
    api: tuple[FakeApi, ApiClient], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake, client = api
    monkeypatch.setattr("penstock.kube.cache.ABSENT_S", 0.01)
    caplog.set_level("INFO")
    gadgets = Resource("", "v1", "gadgets")
    caches = {False: Cache(client, gadgets), True: Cache(client, gadgets, optional=Groups(client))}
    turns: list[bool] = []
    caches[True].on_presence(lambda: turns.append(caches[True].absent))
    tasks = [asyncio.create_task(cache.run()) for cache in caches.values()]
    await asyncio.wait_for(caches[True].synced.wait(), 60)
    await asyncio.sleep(0.1)
    assert not caches[False].synced.is_set()
    assert caplog.text.count("the API server has no /api/v1/gadgets (yet)") == 1
    caches[True]._path = "/api/v1/pods"  # the CRD is installed
    await fake.emit("ADDED", "a")
    await until(lambda: names(caches[True]) == {"a"})
    assert turns == [True, False]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_store_that_was_put_back_to_an_earlier_state_is_read_anew(cached: tuple[FakeApi, Cache, list[Change]]) -> None:
    """etcd was restored from a backup: versions begin lower, and a watch from a later one would hear nothing."""
    fake, cache, changes = cached
    await until(lambda: fake.watches)
    changes.clear()
    fake.version = 5
    fake.log.clear()
    fake.objects.pop("c")
    await fake.emit("MODIFIED", "a", restored=True)
    await fake.hang_up()
    await until(lambda: names(cache) == {"a", "b"})
    assert cache.objects["ns", "a"]["restored"]
    assert {change.key[1] for change in changes} == {"a", "c"}
    await fake.emit("ADDED", "d")
    await until(lambda: "d" in names(cache))


async def test_a_silent_connection_is_taken_for_dead(api: tuple[FakeApi, ApiClient]) -> None:
    fake, client = api
    cache = Cache(client, PODS, silence_s=0.05, backoff=Backoff(first=0.01, longest=0.05))
    task = asyncio.create_task(cache.run())
    await until(lambda: len(fake.watches) >= 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(fake.lists) == 1
