"""One resource in several namespaces: nobody asks beyond them."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient, Configuration

from penstock.kube.cache import Change
from penstock.kube.caches import Caches
from penstock.kube.client import PODS


@pytest.mark.parametrize(("namespaces", "seen"), [(["a", "b"], {"a", "b"}), ([], {"a", "b", "c"})])
async def test_the_pods_of_the_named_namespaces_or_of_all(namespaces: list[str], seen: set[str]) -> None:
    asked: set[str] = set()
    b_may_answer = asyncio.Event()

    async def pods(request: web.Request) -> web.Response:
        asked.add(request.path)
        if "watch" in request.query:
            return web.Response(status=500)
        namespace = request.match_info.get("namespace")
        if namespace == "b":
            await b_may_answer.wait()
        items: list[Any] = [
            {"metadata": {"namespace": one, "name": "pod", "uid": one, "resourceVersion": "1"}}
            for one in ([namespace] if namespace else ["a", "b", "c"])
        ]
        return web.json_response({"kind": "PodList", "metadata": {"resourceVersion": "5"}, "items": items})

    app = web.Application()
    app.router.add_get("/api/v1/namespaces/{namespace}/pods", pods)
    app.router.add_get("/api/v1/pods", pods)
    async with TestServer(app) as server, ApiClient(Configuration(host=str(server.make_url("")).rstrip("/"))) as api:
        changes: list[Change] = []
        caches = Caches(api, PODS, namespaces)
        caches.subscribe(changes.append)
        running = asyncio.create_task(caches.run())
        complete = asyncio.create_task(caches.synced())
        if namespaces:
            await asyncio.sleep(0.1)
            assert not complete.done()  # one namespace alone is not all
        b_may_answer.set()
        await asyncio.wait_for(complete, 60)
        assert {pod["metadata"]["namespace"] for pod in caches.values()} == {change.key[0] for change in changes} == seen
        assert asked == ({f"/api/v1/namespaces/{one}/pods" for one in namespaces} or {"/api/v1/pods"})
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
