"""The real gateway process and a real Envoy, in front of engines that are small HTTP servers."""

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import msgspec
import openai
import pytest

from penstock.api import headers
from penstock.api.fleet import Fleet, Model, Pool
from penstock.gateway.picker.compiled import installed, name_of
from testing import patient

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
NO_HTTP = [
    _HEAD.replace(b"1.1", b"1.0") + b"\r\n",
    _HEAD + b"content-length: -1\r\n\r\n",
    _HEAD + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
    _HEAD + b"x-long: " + b"a" * 100_000 + b"\r\n\r\n",
    b"hello\r\n\r\n",
]


class Stack:
    """A gateway process, an Envoy, and the fleet file between the test and them."""

    def __init__(self, folder: Path, processes: Any, ports: Callable[[int], list[int]], ext_proc: str = "lean") -> None:
        self.ext_proc = ext_proc
        self.fleet_file = folder / "fleet.json"
        self.processes = processes
        self.port, self.grpc_port, self.http_port = ports(3)
        self.url = f"http://127.0.0.1:{self.port}"
        self._fleets = 0
        self.put(Fleet())
        self.start_gateway()
        processes.start("envoy", "envoy", "--gateway", f"127.0.0.1:{self.grpc_port}", "--concurrency", "1", "--node-id", "test")

    def start_gateway(self) -> None:
        where = ("--grpc-port", str(self.grpc_port), "--http-port", str(self.http_port))
        listen = ("--listener-host", "127.0.0.1", "--listener-port", str(self.port))
        server = ("--ext-proc", self.ext_proc)
        command = ("gateway", "--discovery", f"file:{self.fleet_file}", *where, *listen, *server, "--name", "test")
        self.gateway = self.processes.start("gateway", *command)

    def put(self, fleet: Fleet) -> None:
        scratch = self.fleet_file.with_suffix(".new")
        scratch.write_bytes(msgspec.json.encode(fleet))
        scratch.replace(self.fleet_file)

    async def serve(self, fleet: Fleet) -> None:
        """Puts the fleet, and waits until the gateway shows all of it, with a pool that marks this very fleet."""
        self._fleets += 1
        marker = Model(id=f"default/marker-{self._fleets}", served_names=[])
        pool = Pool(id=f"{marker.id}/main", model=marker.id)
        self.put(msgspec.structs.replace(fleet, models=[*fleet.models, marker], pools=[*fleet.pools, pool]))
        async with asyncio.timeout(60), aiohttp.ClientSession() as session:
            wanted = {pool.id, *(f"{it.uid}:{it.port}" for it in fleet.replicas)}
            while not wanted <= await self._shown(session):
                await asyncio.sleep(0.02)

    async def _shown(self, session: aiohttp.ClientSession) -> set[str]:
        async with session.get(f"http://127.0.0.1:{self.http_port}/pools") as response:
            pools = (await response.json())["pools"]
        return {it["id"] for it in pools} | {f"{it['uid']}:{it['port']}" for pool in pools for it in pool["replicas"]}


def wait_until_it_answers(stack: Stack, limit_s: float = 60.0) -> None:
    """Waits until a question through Envoy reaches the picker."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        assert stack.gateway.poll() is None, stack.processes.log("gateway")
        try:
            if patient.get(f"{stack.url}/v1/models", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"no answer in {limit_s} s\n{stack.processes.log('gateway')}\n{stack.processes.log('envoy')}")


@pytest.fixture(scope="module", params=["lean", "lean in Python", "grpc"])
def shared(
    tmp_path_factory: pytest.TempPathFactory, make_processes: Any, in_python: Any, ports: Any, request: pytest.FixtureRequest
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    processes = make_processes(folder)
    ext_proc, _, form = request.param.partition(" in ")
    processes.environment = in_python() if form else {}
    try:
        stack = Stack(folder, processes, ports, ext_proc)
        wait_until_it_answers(stack)
        yield stack
    finally:
        processes.stop()


@pytest.fixture
def own(tmp_path: Path, processes: Any, ports: Any) -> Stack:
    """A stack that the test may break."""
    stack = Stack(tmp_path, processes, ports)
    wait_until_it_answers(stack)
    return stack


@pytest.fixture
async def serving(shared: Stack, engine: Any, fleet_of: Any) -> tuple[Stack, Any, Any]:
    first, second = await engine("first"), await engine("second")
    await shared.serve(fleet_of(first.replica(), second.replica()))
    return shared, first, second


async def error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    assert response.content_type == "application/json"
    return (await response.json())["error"]


async def test_the_gateway_stands_on_the_form_that_is_asked_for(shared: Stack, request: pytest.FixtureRequest) -> None:
    told = patient.get(f"http://127.0.0.1:{shared.http_port}/version").json()
    form = None if "in Python" in request.node.callspec.id else installed()
    assert told["picks"] == name_of(form)


async def test_the_openai_client_works(serving: Any) -> None:
    stack, *_ = serving
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        answer = await client.chat.completions.create(**BODY)
        assert answer.choices[0].message.content == "hello"
        stream = await client.chat.completions.create(**BODY, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "0 1 2 "
        with pytest.raises(openai.NotFoundError, match="nonesuch"):
            await client.chat.completions.create(**{**BODY, "model": "nonesuch"})


async def test_replicas_share_the_work_and_say_who_they_are(serving: Any, client: aiohttp.ClientSession) -> None:
    stack, first, _ = serving
    seen = set()
    for _ in range(10):
        async with client.post(stack.url + PATH, json=BODY) as response:
            assert response.status == 200
            assert response.headers[headers.REPLICA] == f"uid-{(await response.json())['id']}"
            assert headers.LOAD not in response.headers
            seen.add(response.headers[headers.REPLICA])
    assert seen == {"uid-first", "uid-second"}
    assert first.requests[-1][0][headers.LOAD_FORMAT] == "TEXT"


async def test_events_arrive_as_they_are_sent(serving: Any, client: aiohttp.ClientSession) -> None:
    stack, *engines = serving
    for engine in engines:
        engine.pause_s, engine.chunks = 0.1, 5
    arrivals: list[float] = []
    async with client.post(stack.url + PATH, json={**BODY, "stream": True}) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                arrivals.append(time.monotonic())
    assert len(arrivals) == 5
    assert min(later - earlier for earlier, later in pairwise(arrivals)) > 0.05, "none was kept back for the next"


async def test_forged_control_headers_decide_nothing(serving: Any, client: aiohttp.ClientSession) -> None:
    stack, first, second = serving
    forged = {headers.DESTINATION: "127.0.0.1:1", headers.POOL: "penstock_gateway", headers.TENANT: "boss"}
    for _ in range(4):
        async with client.post(stack.url + PATH, json=BODY, headers=forged) as response:
            assert response.status == 200
    received = [its for engine in (first, second) for its, _ in engine.requests]
    assert len(received) == 4
    assert all(headers.TENANT not in its and its.get(headers.POOL) != "penstock_gateway" for its in received)


@pytest.mark.parametrize("body", [b"\x00garbage" * 400_000, b"{}", b'{"model": 3}', b""])
async def test_a_bad_body_is_an_openai_error(serving: Any, client: aiohttp.ClientSession, body: bytes) -> None:
    stack, first, second = serving
    async with client.post(stack.url + PATH, data=body) as response:
        assert response.status == 400
        assert (await error_of(response))["type"] == "invalid_request_error"
    assert first.requests == second.requests == []


@pytest.mark.parametrize("path", ["/v1/nonesuch", "/", "/v1/models/nonesuch"])
async def test_an_unknown_path_is_an_openai_error(serving: Any, client: aiohttp.ClientSession, path: str) -> None:
    async with client.get(serving[0].url + path) as response:
        assert response.status == 404
        assert (await error_of(response))["message"]


@pytest.mark.parametrize("request_", NO_HTTP)
async def test_what_is_no_http_is_an_openai_error(serving: Any, request_: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", serving[0].port)
    writer.write(request_)
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert 400 <= int(head.split()[1]) < 500
    assert b"content-type: application/json" in head
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error" and error["message"]


async def test_a_large_body_arrives_whole(serving: Any, client: aiohttp.ClientSession) -> None:
    stack, first, second = serving
    body = json.dumps({**BODY, "padding": "x" * 5_000_000}).encode()
    async with client.post(stack.url + PATH, data=body) as response:
        assert response.status == 200
    assert [its for engine in (first, second) for _, its in engine.requests] == [body]


async def test_a_body_that_ends_in_trailers_arrives_whole(serving: Any) -> None:
    stack, first, second = serving
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    body = json.dumps(BODY).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\nconnection: close\r\n\r\n"
    writer.write(head.encode() + b"%x\r\n%s\r\n0\r\nx-sum: 1\r\n\r\n" % (len(body), body))
    assert b" 200 OK" in await asyncio.wait_for(reader.readline(), 60)
    writer.close()
    assert [its for engine in (first, second) for _, its in engine.requests] == [body]


@pytest.mark.req("RT-41")
async def test_a_refused_connection_goes_to_the_next(
    shared: Stack, engine: Any, fleet_of: Any, ports: Any, client: aiohttp.ClientSession
) -> None:
    alive = await engine("alive")
    (closed,) = ports(1)
    await shared.serve(fleet_of(alive.replica(), alive.replica(uid="uid-dead", name="dead", port=closed)))
    for _ in range(6):
        async with client.post(shared.url + PATH, json=BODY) as response:
            assert response.status == 200
            assert response.headers[headers.REPLICA] == "uid-alive", (
                "not the one that was picked first, but the one that answered"
            )


async def test_a_refusal_that_did_nothing_goes_to_the_next(serving: Any, client: aiohttp.ClientSession) -> None:
    stack, first, _ = serving
    first.refuse = "retriable"
    for _ in range(4):
        async with client.post(stack.url + PATH, json=BODY) as response:
            assert (response.status, (await response.json())["id"]) == (200, "second")
    assert first.requests, "it was picked, too"


@pytest.mark.req("RT-41")
async def test_without_a_replica_a_request_is_held_and_then_refused(
    shared: Stack, fleet_of: Any, client: aiohttp.ClientSession
) -> None:
    await shared.serve(fleet_of(hold_timeout_s=0.5))
    began = time.monotonic()
    async with client.post(shared.url + PATH, json=BODY) as response:
        assert response.status == 503
        assert int(response.headers["retry-after"]) >= 1
        assert headers.REASON in response.headers
        assert (await error_of(response))["message"]
    assert time.monotonic() - began > 0.4


@pytest.mark.parametrize("known", [True, False], ids=["known before", "appears ready"])
async def test_a_held_request_is_served_when_a_replica_gets_ready(
    shared: Stack, engine: Any, fleet_of: Any, client: aiohttp.ClientSession, known: bool
) -> None:
    its = await engine("late")
    await shared.serve(fleet_of(*([its.replica(ready=False)] if known else []), hold_timeout_s=120))
    asking = asyncio.ensure_future(client.post(shared.url + PATH, json=BODY))
    await asyncio.sleep(0.3)
    assert not asking.done()
    shared.put(fleet_of(its.replica(), hold_timeout_s=120))
    async with await asyncio.wait_for(asking, 60) as response:
        assert (response.status, (await response.json())["id"]) == (200, "late")


@pytest.mark.slow
async def test_a_killed_gateway_cuts_no_answer_and_its_successor_serves(
    own: Stack, engine: Any, fleet_of: Any, client: aiohttp.ClientSession
) -> None:
    its = await engine("only")
    its.pause_s, its.chunks = 0.1, 20
    await own.serve(fleet_of(its.replica()))
    async with client.post(own.url + PATH, json={**BODY, "stream": True}) as response:
        await response.content.readline()
        own.gateway.send_signal(signal.SIGKILL)
        own.gateway.wait()
        async with client.post(own.url + PATH, json=BODY) as refused:
            assert refused.status == 503
            assert refused.headers["retry-after"] == "1"
            assert (await error_of(refused))["code"] == "gateway_unavailable"
        rest = await response.content.read()
    assert rest.count(b"data: {") >= 19
    assert rest.endswith(b"data: [DONE]\n\n")
    own.start_gateway()
    wait_until_it_answers(own)
    async with client.post(own.url + PATH, json=BODY) as response:
        assert response.status == 200


async def test_what_leaves_the_fleet_gets_no_more_requests(serving: Any, fleet_of: Any, client: aiohttp.ClientSession) -> None:
    stack, first, second = serving
    for gone in ({"cordoned": True}, {"terminating": True}, {"ready": False}):
        await stack.serve(fleet_of(first.replica(**gone), second.replica()))
        first.requests.clear()
        for _ in range(4):
            async with client.post(stack.url + PATH, json=BODY) as response:
                assert response.headers[headers.REPLICA] == "uid-second"
        assert first.requests == []


async def test_the_gateway_shows_its_envoys_and_what_they_refuse(serving: Any, client: aiohttp.ClientSession) -> None:
    stack, *_ = serving

    async def shown() -> dict[str, Any]:
        async with client.get(f"http://127.0.0.1:{stack.http_port}/debug/xds") as response:
            (envoy,) = await response.json()
        return envoy

    async with asyncio.timeout(60):
        while not all(its["acknowledged"] for its in (await shown())["types"].values()):
            await asyncio.sleep(0.02)
    envoy = await shown()
    assert envoy["node"] == "test"
    assert all(its["version"] and not its["refusals"] for its in envoy["types"].values())
    assert envoy["types"]["Cluster"]["resources"] == envoy["types"]["ClusterLoadAssignment"]["resources"] == 2
    async with client.get(f"http://127.0.0.1:{stack.http_port}/metrics") as response:
        assert "penstock_xds_envoys 1.0" in await response.text()


async def test_the_access_log_shows_the_decision(serving: Any, client: aiohttp.ClientSession) -> None:
    stack, *_ = serving
    async with client.post(stack.url + PATH, json=BODY) as response:
        request_id, replica = response.headers[headers.REQUEST_ID], response.headers[headers.REPLICA]
    async with asyncio.timeout(60):
        while request_id not in stack.processes.log("envoy"):
            await asyncio.sleep(0.05)
    (line,) = [json.loads(it) for it in stack.processes.log("envoy").splitlines() if request_id in it]
    assert (line["model"], line["policy"], line["replica"]) == ("default/tiny", "RoundRobin", replica)
    assert line["resident_tokens"] == 0
    assert line["waited_ms"] >= 0
    assert "hi" not in line.values()
