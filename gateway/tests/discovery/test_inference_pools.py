"""InferencePools: which replicas each selects, whose names they serve, and watches that come and go with the CRD."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient, Configuration

from penstock.api.fleet import Fleet
from penstock.gateway.discovery.check import check
from penstock.gateway.discovery.kubernetes import KubernetesDiscovery
from penstock.gateway.discovery.objects import fleet_of, trimmed_pod
from penstock.kube import cache as cache_module

Object = dict[str, Any]
EARLY, LATE = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"


def head(name: str, created: str = EARLY, **more: Any) -> Object:
    return {"namespace": "d", "name": name, "uid": f"u-{name}", "resourceVersion": "1", "creationTimestamp": created, **more}


def pool(name: str, labels: Object, *ports: int, created: str = EARLY, **spec: Any) -> Object:
    numbers = [{"number": port} for port in ports or (8000,)]
    return {
        "metadata": head(name, created),
        "spec": {"selector": {"matchLabels": labels}, "targetPorts": numbers, **spec},
    }


def pod(name: str, ip: str, labels: Object, *, ports: dict[str, int] | None = None, **metadata: Any) -> Object:
    named = [{"name": name, "containerPort": port} for name, port in (ports or {}).items()]
    status = {"phase": "Running", "podIP": ip, "conditions": [{"type": "Ready", "status": "True"}]}
    spec = {"containers": [{"name": "server", "ports": named}]}
    return {"metadata": head(name, labels=labels, **metadata), "spec": spec, "status": status}


OURS = {"http": 8000, "events": 5557, "replay": 5558}
MODEL = {"metadata": head("m"), "spec": {"served": {"name": "llama"}, "pools": [{"name": "p"}]}}
MODEL_LABELS = {"penstock.dev/model": "m", "penstock.dev/pool": "p"}


def fleet(*pools: tuple[Object, list[Object]], models: list[Object] | None = None, pods: list[Object] | None = None) -> Fleet:
    chosen = {("d", item["metadata"]["name"]): (item, [trimmed_pod(pod) for pod in its]) for item, its in pools}
    return fleet_of(models or [], [trimmed_pod(pod) for pod in pods or []], inference_pools=chosen)


@pytest.mark.req("RT-14")
def test_pods_of_nobody_become_replicas_of_an_open_model() -> None:
    reference = {"name": "picker", "port": {"number": 9102}, "failureMode": "FailOpen"}
    item = pool("vllm", {"app": "vllm"}, 8000, 8001, endpointPickerRef=reference)
    pods = [
        pod("a", "10.0.0.1", {"app": "vllm", "llm-d.ai/engine-type": "vllm"}, ports={"kv-events": 5557}),
        pod("b", "10.0.0.2", {"app": "vllm", "llm-d.ai/role": "prefill"}, annotations={"llm-d.ai/active-ports": "8001"}),
        pod("c", "10.0.0.3", {"app": "vllm", "llm-d.ai/role": "decode", "inference.networking.k8s.io/engine-type": "sglang"}),
    ]
    found = fleet((item, pods))
    (made,) = found.inference_pools
    model = "inferencepool:d/vllm"
    assert (made.id, made.models, made.picker, made.fails_open) == ("d/vllm", [model], "picker:9102", True)
    assert made.members == ["u-a:8000", "u-a:8001", "u-b:8001", "u-c:8000", "u-c:8001"]
    assert [(it.id, it.role, it.open) for it in found.pools] == [
        (model, "Both", True),
        (f"{model}/Decode", "Decode", True),
        (f"{model}/Prefill", "Prefill", True),
    ]
    first, second = found.replicas[:2]
    assert [(it.name, it.endpoint, it.engine, it.events_port) for it in (first, second)] == [
        ("a:8000", "10.0.0.1:8000", "vllm", 5557),
        ("a:8001", "10.0.0.1:8001", "vllm", 5558),
    ]
    assert {it.name: (it.pool, it.engine) for it in found.replicas[2:]} == {
        "b:8001": (f"{model}/Prefill", "auto"),
        "c:8000": (f"{model}/Decode", "sglang"),
        "c:8001": (f"{model}/Decode", "sglang"),
    }
    assert [(it.id, it.open, it.served_names) for it in found.models] == [(model, True, [])]


def test_a_pool_over_an_inference_model_names_its_replicas() -> None:
    mine, other = (pod(name, f"10.0.0.{n}", MODEL_LABELS, ports=OURS) for n, name in enumerate("ab"))
    by_pod = pool("one-pod", {"penstock.dev/model": "m", "who": "a"})
    found = fleet((pool("all", {"penstock.dev/model": "m"}), [mine, other]), (by_pod, [mine]), models=[MODEL], pods=[mine, other])
    assert {it.id: (it.models, it.members) for it in found.inference_pools} == {
        "d/all": (["d/m"], ["u-a:8000", "u-b:8000"]),
        "d/one-pod": (["d/m"], ["u-a:8000"]),
    }
    assert [it.pool for it in found.replicas] == ["d/m/p", "d/m/p"]
    scaled_to_zero = fleet((pool("all", {"penstock.dev/model": "m"}), []), models=[MODEL])
    assert [(it.models, it.members) for it in scaled_to_zero.inference_pools] == [(["d/m"], [])]
    of_a_model_that_is_gone = fleet((pool("all", {"penstock.dev/model": "m"}), [mine]))
    assert of_a_model_that_is_gone.replicas == []


def test_a_pool_over_data_parallel_pods_names_all_their_ranks() -> None:
    pods = [pod("a", "10.0.0.1", MODEL_LABELS, ports=OURS | {"events-1": 5559, "replay-1": 5560})]
    found = fleet((pool("all", {"penstock.dev/model": "m"}), pods), models=[MODEL], pods=pods)
    assert found.inference_pools[0].members == ["u-a:8000:0", "u-a:8000:1"]
    assert [(it.endpoint, it.rank, it.events_port, it.replay_port) for it in found.replicas] == [
        ("10.0.0.1:8000", 0, 5557, 5558),
        ("10.0.0.1:8000", 1, 5559, 5560),
    ]
    check(found)


def test_a_pool_without_pods_is_there_and_an_endpoint_belongs_to_the_older_of_two() -> None:
    shared = pod("a", "10.0.0.1", {"app": "x"})
    young, old = pool("a-young", {"app": "x"}, created=LATE), pool("z-old", {"app": "x"})
    found = fleet((young, [shared]), (old, [shared]), (pool("empty", {"app": "none"}), []))
    assert {it.id: it.members for it in found.inference_pools} == {"d/a-young": [], "d/empty": [], "d/z-old": ["u-a:8000"]}
    assert [it.pool for it in found.replicas] == ["inferencepool:d/z-old"]


def test_a_pool_that_cannot_be_read_does_not_take_the_others_along(caplog: pytest.LogCaptureFixture) -> None:
    bad = pool("bad", {"app": "x"})
    bad["spec"]["targetPorts"] = [{}]
    assert [it.id for it in fleet((bad, [pod("a", "10.0.0.1", {})]), (pool("good", {}), [])).inference_pools] == ["d/good"]
    assert "InferencePool d/bad is left out" in caplog.text


class Api:
    """An API server of which a test says what it knows: collections by path, filtered by label; 404 for the others."""

    def __init__(self) -> None:
        self.objects: dict[str, list[Object]] = {"/api/v1": []}
        self.queries: list[str] = []
        self.version, self.changed = 1, asyncio.Event()

    def touch(self) -> None:
        self.version += 1
        self.changed.set()
        self.changed = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        known = self.objects.get(request.path)
        if request.path.endswith("/pods"):
            self.queries.append(f"{request.path}?{request.query.get('labelSelector', '')}")
            known = self.objects["/api/v1"]
        if known is None:
            return web.Response(status=404)
        if "watch" in request.query:
            if request.query["resourceVersion"] == str(self.version):  # else it changed between the list and this watch
                await asyncio.wait_for(self.changed.wait(), 60)
            return web.Response(status=410)  # list again
        wanted = [part.partition("=")[::2] for part in request.query.get("labelSelector", "").split(",") if "=" in part]
        if request.path.endswith("/pods") and not wanted:
            wanted = [("penstock.dev/model", "m")]
        items = [it for it in known if all(it["metadata"].get("labels", {}).get(key) == value for key, value in wanted)]
        body = {
            "kind": "List",
            "metadata": {"resourceVersion": str(self.version)},
            "items": items if request.path.endswith("/pods") else known,
        }
        return web.json_response(body)


@pytest.fixture
async def api(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Api, Callable[[], Any]]]:
    monkeypatch.setattr(cache_module, "ABSENT_S", 0.05)
    its, app = Api(), web.Application()
    app.router.add_route("GET", "/{path:.*}", its.answer)
    async with TestServer(app) as server:

        async def connect() -> ApiClient:
            return ApiClient(Configuration(host=str(server.make_url("")).rstrip("/")))

        yield its, connect
        its.touch()


POOLS = "/apis/inference.networking.k8s.io/v1/inferencepools"
PENSTOCK = "/apis/penstock.dev/v1alpha1"


async def test_crds_may_be_absent_and_come_while_the_gateway_runs(api: tuple[Api, Callable[[], Any]]) -> None:
    server, connect = api
    fleets = KubernetesDiscovery([], connect).watch()

    async def following() -> Fleet:
        return await asyncio.wait_for(anext(fleets), 60)

    assert await following() == Fleet()
    server.objects["/api/v1"] = [pod("a", "10.0.0.1", {"app": "vllm", "tier": "x"}), pod("b", "10.0.0.2", {"app": "other"})]
    server.objects[POOLS] = [pool("vllm", {"tier": "x", "app": "vllm"})]
    found = await following()
    assert [(it.id, it.members) for it in found.inference_pools] == [("d/vllm", ["u-a:8000"])]
    assert "/api/v1/namespaces/d/pods?app=vllm,tier=x" in server.queries

    adapter = {"metadata": head("sql"), "spec": {"modelRef": {"name": "m"}, "served": {"name": "sql", "aliases": ["s"]}}}
    server.objects[f"{PENSTOCK}/loraadapters"] = [adapter]
    found = await following()
    assert [(it.id, it.model, it.served_names) for it in found.adapters] == [("d/sql", "d/m", ["sql", "s"])]
    server.objects[f"{PENSTOCK}/inferencemodels"] = [MODEL]
    assert [it.id for it in (await following()).models] == ["d/m", "inferencepool:d/vllm"]

    changed = pool("vllm", {"app": "other"})
    changed["metadata"]["resourceVersion"] = "2"
    server.objects[POOLS] = [changed]
    server.touch()
    seen = [(await following()).inference_pools[0].members]
    if seen[-1] == ["u-a:8000"]:  # a fleet that another cache's relisting made
        seen.append((await following()).inference_pools[0].members)
    assert seen[-1] == ["u-b:8000"]
    server.objects[POOLS] = []
    server.touch()
    while (found := await following()).inference_pools:
        pass
    assert found.replicas == []
    await fleets.aclose()  # type: ignore[attr-defined]
