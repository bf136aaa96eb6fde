"""Envoy as the xDS resources configure it, under a picker that does as the test says."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from prometheus_client import CollectorRegistry

from penstock.api import headers, metrics
from penstock.api.fleet import Pool
from penstock.gateway._pb.envoy.config.core.v3.base_pb2 import HeaderValue
from penstock.gateway._pb.envoy.service.discovery.v3.ads_pb2_grpc import add_AggregatedDiscoveryServiceServicer_to_server
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2_grpc import (
    ExternalProcessorServicer,
    add_ExternalProcessorServicer_to_server,
)
from penstock.gateway.extproc.call import READ
from penstock.gateway.extproc.health import Health
from penstock.gateway.xds.listener import ListenerSettings
from penstock.gateway.xds.server import AdsServicer

POOL = "default/tiny/main"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


Requests = AsyncIterator[ProcessingRequest]


class ScriptedPicker(ExternalProcessorServicer):
    """Sends every request where the test says, whole bodies at once."""

    def __init__(self) -> None:
        self.destinations = ""
        self.pool = POOL
        self.immediate: tuple[int, str] | None = None
        self.details = ""
        self.seen: list[dict[str, str]] = []

    async def Process(
        self, request_iterator: AsyncIterator[ProcessingRequest], context: Any
    ) -> AsyncIterator[ProcessingResponse]:
        chunks: list[bytes] = []
        async for request in request_iterator:
            ended = False
            match request.WhichOneof("request"):
                case "request_headers":
                    self.seen.append({it.key: it.raw_value.decode() for it in request.request_headers.headers.headers})
                    ended = request.request_headers.end_of_stream
                    if ended:
                        yield self._refusal(404, "nothing here")
                        return
                case "request_body":
                    chunks.append(request.request_body.body)
                    ended = request.request_body.end_of_stream
            if ended:
                for response in self._answers(b"".join(chunks)):
                    yield response

    def _answers(self, body: bytes) -> list[ProcessingResponse]:
        if self.immediate is not None:
            return [self._refusal(*self.immediate)]
        head = ProcessingResponse()
        common = head.request_headers.response
        common.clear_route_cache = True
        for key, value in ((headers.DESTINATION, self.destinations), (headers.POOL, self.pool), (headers.LOAD_FORMAT, "TEXT")):
            common.header_mutation.set_headers.add(append_action=2).header.MergeFrom(_header(key, value))
        head.dynamic_metadata.update({headers.METADATA_NAMESPACE: {headers.DESTINATION: self.destinations}})
        answers = [head]
        pieces = [body[start : start + 62_000] for start in range(0, len(body), 62_000)] or [b""]
        for index, piece in enumerate(pieces):
            answer = ProcessingResponse()
            streamed = answer.request_body.response.body_mutation.streamed_response
            streamed.body, streamed.end_of_stream = piece, index == len(pieces) - 1
            answers.append(answer)
        return answers

    def _refusal(self, status: int, text: str) -> ProcessingResponse:
        response = ProcessingResponse()
        immediate = response.immediate_response
        immediate.status.code, immediate.body, immediate.details = (
            status,
            json.dumps({"picker": text}).encode(),
            "penstock_refused",
        )
        immediate.headers.set_headers.add(append_action=2).header.MergeFrom(_header("content-type", "application/json"))
        return response


def _header(key: str, value: str) -> HeaderValue:
    return HeaderValue(key=key, raw_value=value.encode())


class Rig:
    """A gateway in this process and an Envoy in its own."""

    def __init__(self, port: int, admin_port: int, grpc_port: int, processes: Any) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.admin = f"http://127.0.0.1:{admin_port}"
        self.picker = ScriptedPicker()
        self.registry = CollectorRegistry()
        self.processes = processes
        self._settings = ListenerSettings(host="127.0.0.1", port=port)
        self._grpc_port = grpc_port
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self.ads = AdsServicer(self._settings, CollectorRegistry() if self._server else self.registry)
        self._server = grpc.aio.server()
        add_AggregatedDiscoveryServiceServicer_to_server(self.ads, self._server)
        add_ExternalProcessorServicer_to_server(self.picker, self._server)
        health = Health()
        await health.ready(True)
        add_HealthServicer_to_server(health.servicer, self._server)
        self._server.add_insecure_port(f"127.0.0.1:{self._grpc_port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)

    async def stat(self, client: aiohttp.ClientSession, name: str) -> int:
        async with client.get(f"{self.admin}/stats", params={"filter": f"^{name}$", "format": "json"}) as response:
            stats = (await response.json(content_type=None))["stats"]
        return next((it["value"] for it in stats if it.get("name") == name), 0)


async def eventually(holds: Callable[[], Awaitable[bool]], limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while not await holds():
            await asyncio.sleep(0.02)


@pytest.fixture
async def rig(processes: Any, ports: Any) -> AsyncIterator[Rig]:
    port, admin, grpc_port = ports(3)
    its = Rig(port, admin, grpc_port, processes)
    await its.start()
    envoy = ("--gateway", f"127.0.0.1:{grpc_port}", "--admin-port", str(admin), "--concurrency", "1", "--node-id", "test")
    its.processes.start("envoy", "envoy", *envoy)
    yield its
    await its.stop()


@pytest.fixture
async def serving(rig: Rig, engine: Any, client: aiohttp.ClientSession, fleet_of: Any) -> tuple[Rig, Any, Any]:
    """Envoy serving two engines, the picker choosing the first and then the second."""
    first, second = await engine("first"), await engine("second")
    rig.ads.update(fleet_of(first.replica(), second.replica()))
    rig.picker.destinations = f"{first.endpoint},{second.endpoint}"
    await eventually(lambda: accepts(client, rig))
    return rig, first, second


async def accepts(client: aiohttp.ClientSession, rig: Rig) -> bool:
    try:
        async with client.get(rig.url) as response:
            return response.status == 404
    except aiohttp.ClientConnectionError:
        return False


async def error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    assert response.content_type == "application/json"
    return (await response.json())["error"]


async def test_nothing_is_served_before_the_first_fleet_and_everything_after(
    rig: Rig, engine: Any, client: aiohttp.ClientSession, fleet_of: Any
) -> None:
    async def connected() -> bool:
        try:
            return await rig.stat(client, "control_plane.connected_state") == 1
        except aiohttp.ClientConnectionError:
            return False

    await eventually(connected)
    await asyncio.sleep(0.2)
    assert await rig.stat(client, "listener_manager.lds.update_success") == 0
    its = await engine("only")
    rig.picker.destinations = its.endpoint
    rig.ads.update(fleet_of(its.replica()))
    await eventually(lambda: accepts(client, rig))
    async with client.post(rig.url + PATH, json=BODY) as response:
        assert (await response.json())["id"] == "only"
    for kind in ("cluster_manager.cds", "listener_manager.lds", "http.penstock.rds.penstock"):
        assert await rig.stat(client, f"{kind}.update_rejected") == 0


async def test_the_picker_decides_and_forged_headers_are_gone(serving: Any, client: aiohttp.ClientSession) -> None:
    rig, first, second = serving
    rig.picker.destinations = second.endpoint
    forged = dict.fromkeys(headers.CONTROL_HEADERS, "forged") | {
        headers.DESTINATION: first.endpoint,
        headers.REQUEST_ID: "forged",
    }
    async with client.post(rig.url + PATH, json=BODY, headers=forged) as response:
        assert (await response.json())["id"] == "second"
        assert headers.LOAD not in response.headers
        request_id = response.headers[headers.REQUEST_ID]
    asked = rig.picker.seen[-1]
    assert {":path", ":method", headers.REQUEST_ID} <= set(asked) <= READ
    received, body = second.requests[-1]
    assert not {name for name, value in forged.items() if received.get(name) == value}
    assert received[headers.REQUEST_ID] == asked[headers.REQUEST_ID] == request_id != "forged"
    assert received[headers.LOAD_FORMAT] == "TEXT"
    assert json.loads(body) == BODY


async def test_a_replica_does_not_speak_in_the_pickers_place(serving: Any, client: aiohttp.ClientSession) -> None:
    rig, first, _ = serving
    rig.picker.destinations = first.endpoint
    first.says = dict.fromkeys((headers.REPLICA, headers.MODEL, headers.DECISION), "forged") | {"x-own": "stays"}
    for stream in (False, True):
        async with client.post(rig.url + PATH, json={**BODY, "stream": stream}) as response:
            assert (response.status, response.headers["x-own"]) == (200, "stays")
            assert response.headers.getall(headers.REPLICA) == ["uid-first"]
            assert not {headers.MODEL, headers.DECISION} & {name.lower() for name in response.headers}, "nobody asked, or noted"


async def test_nobodys_envoy_headers_are_obeyed(serving: Any, client: aiohttp.ClientSession) -> None:
    rig, first, _ = serving
    first.pause_s, first.refuse = 0.1, ""
    orders = {"x-envoy-upstream-rq-timeout-ms": "20", "x-envoy-max-retries": "9", "x-envoy-retry-on": "5xx"}
    async with client.post(rig.url + PATH, json={**BODY, "stream": True}, headers=orders) as response:
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
    assert not [name for name in first.requests[-1][0] if name in orders]
    assert len(first.requests) == 1


async def test_a_refused_connection_goes_to_the_next(
    serving: Any, client: aiohttp.ClientSession, fleet_of: Any, ports: Any
) -> None:
    rig, first, second = serving
    (closed,) = ports(1)
    dead = first.replica(uid="dead", name="dead", port=closed)
    rig.ads.update(fleet_of(dead, first.replica(), second.replica()))
    rig.picker.destinations = f"{dead.endpoint},{second.endpoint}"

    async def member() -> bool:
        return await rig.stat(client, f"cluster.{POOL}.membership_total") == 3

    await eventually(member)
    for _ in range(5):
        async with client.post(rig.url + PATH, json=BODY) as response:
            assert (response.status, (await response.json())["id"]) == (200, "second")
    assert first.requests == []


async def test_a_refusal_that_did_nothing_goes_to_the_next_with_its_body(serving: Any, client: aiohttp.ClientSession) -> None:
    rig, first, second = serving
    first.refuse = "retriable"
    body = {**BODY, "padding": "x" * 20_000_000}
    async with client.post(rig.url + PATH, json=body) as response:
        assert (response.status, (await response.json())["id"]) == (200, "second")
    assert first.requests[0][1] == second.requests[0][1] == json.dumps(body).encode()


async def test_any_other_refusal_reaches_the_client_as_it_is(serving: Any, client: aiohttp.ClientSession) -> None:
    rig, first, second = serving
    first.refuse = "plain"
    async with client.post(rig.url + PATH, json=BODY) as response:
        assert response.status == 503
        assert response.headers["retry-after"] == "7"
        assert await error_of(response) == {"message": "draining"}
    assert second.requests == []


async def test_a_replica_that_breaks_off_is_an_openai_error_and_final(serving: Any, client: aiohttp.ClientSession) -> None:
    rig, first, second = serving
    first.refuse = "reset"
    async with client.post(rig.url + PATH, json=BODY) as response:
        assert response.status == 503
        assert response.headers["retry-after"] == "1"
        assert (await error_of(response))["code"] == "replica_failed"
    assert second.requests == []


async def test_an_answer_that_is_torn_breaks_and_is_final(serving: Any, client: aiohttp.ClientSession) -> None:
    rig, first, second = serving
    first.refuse = "torn"
    with pytest.raises(aiohttp.ClientError):
        async with client.post(rig.url + PATH, json=BODY) as response:
            await response.read()
    assert second.requests == []


async def test_no_replica_is_an_openai_error(serving: Any, client: aiohttp.ClientSession, fleet_of: Any) -> None:
    rig, first, _ = serving
    rig.ads.update(fleet_of())

    async def empty() -> bool:
        return await rig.stat(client, f"cluster.{POOL}.membership_total") == 0

    await eventually(empty)
    async with client.post(rig.url + PATH, json=BODY) as response:
        assert response.status == 503
        assert response.headers["retry-after"] == "1"
        assert response.headers[headers.REASON] == "no_ready_replica"
        assert (await error_of(response))["code"] == "no_ready_replica"
    assert first.requests == []


async def test_an_unknown_pool_is_an_openai_error(serving: Any, client: aiohttp.ClientSession) -> None:
    rig, _, _ = serving
    rig.picker.pool = "default/other/main"
    async with client.post(rig.url + PATH, json=BODY) as response:
        assert response.status == 503
        assert (await error_of(response))["type"] == "server_error"


@pytest.mark.parametrize("details", ["penstock_refused", ""])
async def test_the_pickers_own_answers_are_left_alone(serving: Any, client: aiohttp.ClientSession, details: str) -> None:
    rig, _, _ = serving
    rig.picker.details = details
    for status in (400, 404, 429, 503):
        rig.picker.immediate = (status, "no")
        async with client.post(rig.url + PATH, json=BODY) as response:
            assert (response.status, await response.json()) == (status, {"picker": "no"})
            assert "retry-after" not in response.headers


async def test_a_picker_that_is_away_is_an_openai_error_and_comes_back(
    serving: Any, client: aiohttp.ClientSession, fleet_of: Any
) -> None:
    rig, first, second = serving
    await rig.stop()
    async with client.post(rig.url + PATH, json=BODY) as response:
        assert response.status == 503
        assert response.headers["retry-after"] == "1"
        assert (await error_of(response))["code"] == "gateway_unavailable"
    await rig.start()
    rig.ads.update(fleet_of(first.replica(), second.replica()))

    async def serves() -> bool:
        async with client.post(rig.url + PATH, json=BODY) as response:
            return response.status == 200

    await eventually(serves)
    # The same fleet has the same versions: a restarted gateway makes Envoy load nothing anew.
    assert await rig.stat(client, "listener_manager.listener_modified") == 0
    assert await rig.stat(client, "cluster_manager.cluster_modified") == 0


async def test_events_arrive_as_they_are_sent(serving: Any, client: aiohttp.ClientSession) -> None:
    rig, first, _ = serving
    first.pause_s, first.chunks = 0.1, 5
    arrivals: list[float] = []
    async with client.post(rig.url + PATH, json={**BODY, "stream": True}) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                arrivals.append(asyncio.get_running_loop().time())
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert len(gaps) == 4
    assert min(gaps) > 0.05, "none was kept back for the next"


async def test_streams_outlive_the_picker(serving: Any, client: aiohttp.ClientSession) -> None:
    rig, first, _ = serving
    first.pause_s, first.chunks = 0.1, 8
    async with client.post(rig.url + PATH, json={**BODY, "stream": True}) as response:
        await response.content.readline()
        await rig.stop()
        rest = await response.content.read()
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_a_pool_has_a_cluster_before_it_has_replicas(serving: Any, client: aiohttp.ClientSession, fleet_of: Any) -> None:
    rig, first, _ = serving
    fleet = fleet_of(first.replica())
    fleet.pools.append(Pool(id="default/tiny/other", model="default/tiny"))
    rig.ads.update(fleet)
    rig.picker.pool = "default/tiny/other"

    async def no_replica() -> bool:
        async with client.post(rig.url + PATH, json=BODY) as response:
            return (await error_of(response))["code"] == "no_ready_replica"

    await eventually(no_replica)
    fleet.replicas.append(first.replica(uid="other", name="other", pool="default/tiny/other"))
    rig.ads.update(fleet)
    rig.picker.destinations = first.endpoint

    async def serves() -> bool:
        async with client.post(rig.url + PATH, json=BODY) as response:
            return response.status == 200

    await eventually(serves)


async def test_what_envoy_refuses_is_counted_and_changes_nothing(
    serving: Any, client: aiohttp.ClientSession, fleet_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rig, first, second = serving
    rig.ads.update(fleet_of(first.replica(), second.replica(host="not-an-address")))
    assert await rig.ads.applied(5.0), "a refusal is an answer"
    assert rig.registry.get_sample_value(f"{metrics.XDS_NACKS}_total", {"type": "ClusterLoadAssignment"}) == 1
    assert "not-an-address" in caplog.text
    assert "not-an-address" in rig.ads.refused_pools()[POOL]
    (view,) = rig.ads.view()
    ((refusal,), clusters) = view.types["ClusterLoadAssignment"].refusals, view.types["Cluster"]
    assert (view.node, refusal.resources, clusters.acknowledged, clusters.refusals) == ("test", [POOL], True, [])
    async with client.post(rig.url + PATH, json=BODY) as response:
        assert (await response.json())["id"] == "first"
    rig.ads.update(fleet_of(second.replica()))
    assert await rig.ads.applied(5.0)
    assert rig.ads.refused_pools() == {}


async def test_what_is_applied_can_be_picked_at_once(
    serving: Any, engine: Any, client: aiohttp.ClientSession, fleet_of: Any
) -> None:
    rig, first, second = serving
    fleet = fleet_of(first.replica(), second.replica())
    for number in range(20):
        its = await engine(f"new-{number}")
        pool = f"default/tiny/new-{number}"
        fleet.pools.append(Pool(id=pool, model="default/tiny"))
        fleet.replicas.append(its.replica(pool=pool))
        rig.ads.update(fleet)
        assert await rig.ads.applied(5.0)
        rig.picker.pool, rig.picker.destinations = pool, its.endpoint
        async with client.post(rig.url + PATH, json=BODY) as response:
            assert (response.status, (await response.json())["id"]) == (200, its.name)


async def test_the_access_log_tells_the_decision_and_not_the_prompt(serving: Any, client: aiohttp.ClientSession) -> None:
    rig, first, second = serving
    async with client.post(rig.url + PATH + "?secret=1", json={**BODY, "user": "secret"}) as response:
        request_id = response.headers[headers.REQUEST_ID]
    await eventually(lambda: _logged(rig, request_id))
    lines = [json.loads(line) for line in rig.processes.log("envoy").splitlines() if line.startswith("{")]
    line = next(line for line in lines if line["request_id"] == request_id)
    assert (line["path"], line["status"], line["pool"], line["upstream"]) == (PATH, 200, POOL, first.endpoint)
    assert line["destinations"] == f"{first.endpoint},{second.endpoint}"
    assert "secret" not in rig.processes.log("envoy")


async def _logged(rig: Rig, request_id: str) -> bool:
    return request_id in rig.processes.log("envoy")
