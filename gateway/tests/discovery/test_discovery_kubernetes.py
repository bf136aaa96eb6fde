"""Discovery from the API server's objects."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient, Configuration

from penstock.api.fleet import Weights
from penstock.gateway.discovery.kubernetes import KubernetesDiscovery
from penstock.gateway.discovery.objects import fleet_of, trimmed_pod

Object = dict[str, Any]
PORTS = {"http": 8000, "events": 5557, "replay": 5558}


def model(name: str, *names: str, created: str = "2026-01-01T00:00:00Z", **spec: Any) -> Object:
    return {
        "metadata": {"namespace": "d", "name": name, "creationTimestamp": created, "uid": name, "resourceVersion": "1"},
        "spec": {"served": {"name": names[0], "aliases": list(names[1:])}, "pools": [{"name": "p"}], **spec},
    }


def pod(
    name: str, *, ip: str | None = "10.0.0.1", ready: str = "True", of: str = "m", pool: str = "p", **metadata: Any
) -> Object:
    ports = [
        {"name": "http", "containerPort": 8000},
        {"name": "events", "containerPort": 5557},
        {"name": "replay", "containerPort": 5558},
    ]
    status: Object = {"phase": "Running", "conditions": [{"type": "Ready", "status": ready}]}
    if ip is not None:
        status["podIP"] = ip
    marks = {"penstock.dev/model": of, "penstock.dev/pool": pool}
    full = {"namespace": "d", "name": name, "uid": f"u-{name}", "resourceVersion": "1", "labels": marks, **metadata}
    return trimmed_pod({"metadata": full, "spec": {"containers": [{"name": "engine", "ports": ports}]}, "status": status})


def test_models_give_pools_and_pods_give_replicas() -> None:
    routing = {"policy": "RoundRobin", "holdTimeout": "1m30s", "weights": {"prefix": 5}, "priority": -3}
    fleet = fleet_of([model("m", "llama", "l", routing=routing)], [pod("b"), pod("a", ready="False")])
    assert fleet.models[0].weights == Weights(prefix=5, queue=2, kv=2)
    assert fleet.models[0].priority == -3
    assert (fleet.models[0].served_names, fleet.models[0].policy, fleet.models[0].hold_timeout_s) == (
        ["llama", "l"],
        "RoundRobin",
        90,
    )
    assert [(pool.id, pool.model, pool.role) for pool in fleet.pools] == [("d/m/p", "d/m", "Both")]
    assert [(it.name, it.ready) for it in fleet.replicas] == [("a", False), ("b", True)]
    first = fleet.replicas[1]
    assert (first.uid, first.pool, first.endpoint) == ("u-b", "d/m/p", "10.0.0.1:8000")
    assert (first.events_port, first.replay_port) == (5557, 5558)


def test_the_autoscalers_last_word_comes_from_the_status() -> None:
    sized = model("m", "m")
    sized["status"] = {"scaling": [{"pool": "p", "current": 1, "desired": 2, "constraint": "Demand", "reason": "8 requests"}]}
    assert fleet_of([sized], []).scaling == {"d/m/p": "Demand: 8 requests"}


def test_what_must_not_be_picked_says_so() -> None:
    going = pod("going", deletionTimestamp="2026-01-01T00:00:00Z")
    victim = pod("victim", annotations={"penstock.dev/cordoned": "true"})
    fleet = fleet_of([model("m", "m")], [going, victim])
    assert [(it.terminating, it.cordoned) for it in fleet.replicas] == [(True, False), (False, True)]


def test_pods_that_are_no_replicas_are_left_out() -> None:
    ended = pod("ended")
    ended["status"]["phase"] = "Failed"
    portless = pod("portless")
    portless["spec"]["containers"][0]["ports"] = []
    strangers = [pod("no-address", ip=None), pod("of-no-model", of="gone"), pod("of-no-pool", pool="gone"), ended, portless]
    assert fleet_of([model("m", "m")], strangers).replicas == []


def test_a_pool_that_its_model_names_no_longer_serves_until_its_pods_are_gone() -> None:
    marks = {"penstock.dev/model": "m", "penstock.dev/pool": "old", "penstock.dev/role": "Decode"}
    renamed, left = model("m", "m"), pod("left", labels=marks)
    fleet = fleet_of([renamed], [left, pod("new")])
    assert {pool.id: (pool.model, pool.role) for pool in fleet.pools} == {"d/m/p": ("d/m", "Both"), "d/m/old": ("d/m", "Decode")}
    assert {it.name: it.pool for it in fleet.replicas} == {"left": "d/m/old", "new": "d/m/p"}
    odd = pod("odd", labels={**marks, "penstock.dev/role": "Chief"})
    for pods in ([], [odd], [pod("stranger", labels={**marks, "penstock.dev/model": "gone"})]):
        assert [pool.id for pool in fleet_of([renamed], pods).pools] == ["d/m/p"]


def test_one_unreadable_model_does_not_take_the_others_along(caplog: pytest.LogCaptureFixture) -> None:
    fleet = fleet_of([model("bad", "b", pools=None), model("good", "g", newer={"field": 1})], [])
    assert [it.id for it in fleet.models] == ["d/good"]
    assert "d/bad is left out" in caplog.text


async def test_yields_nothing_before_both_lists_are_complete() -> None:
    pods_may_answer = asyncio.Event()

    def answer(request: web.Request, kind: str, items: list[Object]) -> web.Response:
        if "watch" in request.query:
            return web.Response(status=500)
        return web.json_response({"kind": kind, "metadata": {"resourceVersion": "5"}, "items": items})

    async def models(request: web.Request) -> web.Response:
        return answer(request, "InferenceModelList", [model("m", "m")])

    async def pods(request: web.Request) -> web.Response:
        await pods_may_answer.wait()
        return answer(request, "PodList", [pod("a")])

    app = web.Application()
    app.router.add_get("/apis/penstock.dev/v1alpha1/namespaces/d/inferencemodels", models)
    app.router.add_get("/api/v1/namespaces/d/pods", pods)
    async with TestServer(app) as server:

        async def connect() -> ApiClient:
            return ApiClient(Configuration(host=str(server.make_url("")).rstrip("/")))

        fleets = KubernetesDiscovery(["d"], connect).watch()
        first = asyncio.ensure_future(anext(fleets))
        await asyncio.sleep(0.2)
        assert not first.done()
        pods_may_answer.set()
        assert [it.name for it in (await asyncio.wait_for(first, 60)).replicas] == ["a"]
        await fleets.aclose()  # type: ignore[attr-defined]
