"""The operator's start, against a small API server: what it must know before it says or does anything."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient, Configuration

from penstock.operator import process
from penstock.operator.adapters.plan import Origin
from penstock.operator.api import AUTOSCALERS, MODELS, PODS
from penstock.operator.desired import Rendering
from penstock.operator.process import Operator, Options
from penstock.operator.replicas import Replicas
from penstock.operator.telemetry import Exposition

Object = dict[str, Any]

OPTIONS = Options(
    rendering=Rendering(image="engine:1"),
    namespaces=(),
    system_namespace="penstock-system",
    kubeconfig=None,
    leader_elect=False,
    resync_s=300.0,
    http_host="127.0.0.1",
    http_port=0,
    gateway_url="",
    gateway_http_port=9090,
    replica_tls=None,
    budgets={},
)
THEIRS = {
    "metadata": {"name": "theirs", "namespace": "default", "uid": "u", "resourceVersion": "1"},
    "spec": {"scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "tiny-main"}},
}


class FakeServer:
    """One model and one HorizontalPodAutoscaler, whose list it keeps back; what is applied, it takes and forgets."""

    def __init__(self, *models: Object, pods: Sequence[Object] = ()) -> None:
        self.lists = {MODELS.path(None): list(models), PODS.path(None): list(pods), AUTOSCALERS.path(None): [THEIRS]}
        self.asked: list[str] = []
        self.autoscalers: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The status with which their list is answered."""
        self.statuses: asyncio.Queue[Object] = asyncio.Queue()
        """The model's, as they are written."""
        self.applied = 0
        self.over = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if request.method == "PATCH":
            body = await request.json()
            self.applied += 1
            if body["kind"] == "InferenceModel":
                self.statuses.put_nowait(body["status"])
                return web.json_response({**self._model(body["metadata"]["name"]), "status": body["status"]})
            return web.json_response(body)
        if request.query.get("watch") == "true":
            await self.over.wait()
        parent, _, name = path.rpartition("/")
        if parent.endswith("/inferencemodels"):
            return web.json_response(self._model(name))
        if "/namespaces/default/" in path:
            return web.Response(status=404)
        self.asked.append(path)
        if path == AUTOSCALERS.path(None) and (status := await self.autoscalers) != 200:
            return web.Response(status=status)
        return web.json_response({"metadata": {"resourceVersion": "5"}, "items": self.lists.get(path, [])})

    def _model(self, name: str) -> Object:
        (model,) = (it for it in self.lists[MODELS.path(None)] if it["metadata"]["name"] == name)
        return model


@asynccontextmanager
async def operating(fake: FakeServer, options: Options = OPTIONS, replicas: Replicas | None = None) -> AsyncIterator[FakeServer]:
    stop, replicas = asyncio.Event(), replicas or Replicas()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.handle)
    async with TestServer(app) as server, ApiClient(Configuration(host=str(server.make_url("")).rstrip("/"))) as api:
        running = asyncio.create_task(Operator(api, options, replicas, Exposition()).run(stop))
        try:
            yield fake
        finally:
            fake.over.set()
            stop.set()
            await asyncio.wait_for(running, 60)
            await replicas.close()


async def scaling_active(fake: FakeServer) -> str:
    """The reason that the next status gives."""
    status = await asyncio.wait_for(fake.statuses.get(), 60)
    return next(it["reason"] for it in status["conditions"] if it["type"] == "ScalingActive")


@pytest.mark.parametrize(("answer", "reason"), [(200, "OtherAutoscaler"), (403, "NotConfigured"), (404, "NotConfigured")])
async def test_nothing_is_said_before_it_is_known_who_else_sizes_a_model(make: Any, answer: int, reason: str) -> None:
    async with operating(FakeServer(make.resource())) as fake:
        async with asyncio.timeout(60):
            while len(fake.asked) < 16:  # a list of everything that it watches
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert fake.statuses.empty()
        fake.autoscalers.set_result(answer)
        assert await scaling_active(fake) == reason


class SilentReplicas(Replicas):
    """They do not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    async def adapters(self, base: str) -> dict[str, Origin]:
        self.asked += 1
        await asyncio.Event().wait()
        raise AssertionError


async def test_replicas_that_do_not_answer_hold_up_no_reconcile(make: Any) -> None:
    names = [f"m{number}" for number in range(process.WORKERS + 1)]
    pods = [make.ready_pod(f"{name}-pod", model=name, podIP="127.0.0.1") for name in names]
    for pod in pods:
        pod["metadata"]["resourceVersion"] = "1"
    lora = {"slots": 2, "sources": [{"prefix": "/adapters"}]}
    fake = FakeServer(*(make.resource(name, lora=lora) for name in names), pods=pods)
    fake.autoscalers.set_result(200)
    replicas = SilentReplicas()
    async with operating(fake, replace(OPTIONS, resync_s=0.2), replicas), asyncio.timeout(60):
        while replicas.asked < min(process.WORKERS, process.LOADERS):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        before = fake.applied
        while fake.applied < before + 20:
            await asyncio.sleep(0.01)


async def test_operators_tell_which_of_them_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the one that waits: what only a leader tells would be gone with the last leader."""
    exposition, seen = Exposition(), list[bytes]()
    leader = process.leader_gauge(exposition.registry)

    class Acts:
        def __init__(self, *_: Any) -> None: ...

        async def run(self, stop: asyncio.Event) -> None:
            seen.append(exposition.render())

    monkeypatch.setattr(process, "Operator", Acts)
    assert b"penstock_operator_leader 0.0" in exposition.render()
    await process._operate(cast(Any, None), OPTIONS, Replicas(), exposition, leader, asyncio.Event())
    assert b"penstock_operator_leader 1.0" in seen[0]
    assert b"penstock_operator_leader 0.0" in exposition.render()
