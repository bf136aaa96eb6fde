"""The whole gateway process over its sockets: a raw gRPC client in Envoy's place, small HTTP servers in the engines'."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import grpc
import msgspec
import orjson
import pytest
from aiohttp import web
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from tokenizers import Tokenizer, models, pre_tokenizers

from penstock.api import headers, load_report
from penstock.api.events import BlockStored
from penstock.api.fleet import Fleet, Model, Pool, PoolsView, Replica
from penstock.api.load_report import LoadReport
from penstock.gateway._pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from penstock.gateway._pb.envoy.service.discovery.v3.ads_pb2_grpc import AggregatedDiscoveryServiceStub
from penstock.gateway._pb.envoy.service.discovery.v3.discovery_pb2 import DiscoveryRequest
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
)
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub
from penstock.gateway.picker.candidates import key_of
from penstock.gateway.process import Gateway, GatewaySettings
from penstock.gateway.xds.listener import ListenerSettings
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.hashing import BlockHasher

WORDS = [f"w{n}" for n in range(100)]
PROMPT = " ".join(WORDS[:64])
TOKENIZER = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="w0"))
TOKENIZER.pre_tokenizer = pre_tokenizers.Whitespace()
BUNDLE = PromptBundle(
    served_names=("tiny",),
    tokenizer=TOKENIZER.to_str(),
    chat_template=None,
    special_tokens={},
    block_size=16,
    hash_seed="penstock",
    max_model_len=512,
)


class Engine:
    """A replica's HTTP side."""

    def __init__(self) -> None:
        self.report = LoadReport(epoch=1, seq=1, max_num_seqs=8, prefill_tokens_per_s=1000.0, decode_step_s=0.01)
        self.bundles = 0

    async def start(self, stack: contextlib.AsyncExitStack) -> int:
        app = web.Application()
        app.add_routes([web.get("/load", self._load), web.get("/prompt-bundle", self._bundle)])
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner.addresses[0][1]

    async def _load(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self.report))

    async def _bundle(self, request: web.Request) -> web.Response:
        self.bundles += 1
        tag = f'"{BUNDLE.digest}"'
        if tag in request.headers.get("if-none-match", ""):
            return web.Response(status=304, headers={"etag": tag})
        return web.Response(body=BUNDLE.to_json(), headers={"etag": tag})


class QueueDiscovery:
    """Yields what a test says."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Fleet] = asyncio.Queue()

    async def watch(self) -> AsyncIterator[Fleet]:
        while True:
            yield await self.queue.get()


class World:
    """A gateway with two replicas of the model `tiny`."""

    def __init__(self) -> None:
        self.discovery = QueueDiscovery()
        settings = GatewaySettings(
            name="gw", host="127.0.0.1", grpc_port=0, http_port=0, listener=ListenerSettings(host="127.0.0.1", port=1)
        )
        self.gateway = Gateway(settings, self.discovery)
        self.state = self.gateway._follower.state
        self.engines = [Engine(), Engine()]
        self.replicas: list[Replica] = []
        self.stop = asyncio.Event()

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        for n, engine in enumerate(self.engines):
            port = await engine.start(stack)
            self.replicas.append(
                Replica(
                    uid=f"u{n}",
                    name=f"r{n}",
                    pool="ns/tiny/p",
                    host="127.0.0.1",
                    port=port,
                    events_port=1,
                    replay_port=1,
                    ready=True,
                )
            )
        started = asyncio.Event()
        self.task = asyncio.create_task(self.gateway.run(self.stop, started))
        stack.push_async_callback(self.shut_down)
        await started.wait()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.gateway.grpc_port}")
        stack.push_async_callback(self.channel.close)
        self.http = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{self.gateway.http_port}"))

    async def shut_down(self) -> None:
        self.stop.set()
        await self.task

    def fleet(self, *replicas: Replica, hold_timeout_s: float = 5.0) -> None:
        model = Model(id="ns/tiny", served_names=["tiny", "alias"], created=7.0, hold_timeout_s=hold_timeout_s)
        pool = Pool(id="ns/tiny/p", model="ns/tiny")
        self.discovery.queue.put_nowait(Fleet(models=[model], pools=[pool], replicas=list(replicas)))

    async def ready(self, **changes: Any) -> None:
        self.fleet(*self.replicas, **changes)
        await until(lambda: all(self.state.reports.get(key_of(r)) for r in self.replicas))
        await until(lambda: all(engine.bundles for engine in self.engines))
        await asyncio.sleep(0.05)  # the last bundle on its way into the library

    async def get(self, path: str) -> Any:
        async with self.http.get(path) as response:
            assert response.status == 200, await response.text()
            return await response.json()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    async with contextlib.AsyncExitStack() as stack:
        await world.start(stack)
        yield world


class Stream:
    """One request as Envoy would put it to the picker."""

    def __init__(self, world: World) -> None:
        self.call = ExternalProcessorStub(world.channel).Process()

    async def ask(
        self, body: Any = None, *, path: str = "/v1/completions", subset: Any = None, **more: str
    ) -> ProcessingResponse:
        """Sends the request; returns the first answer."""
        raw = body if isinstance(body, bytes) else b"" if body is None else orjson.dumps(body)
        message = ProcessingRequest(request_headers=HttpHeaders(end_of_stream=not raw))
        fields = {":method": "POST" if raw else "GET", ":path": path, "x-request-id": "rid", **more}
        for name, value in fields.items():
            message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        message.protocol_config.request_body_mode = ProcessingMode.FULL_DUPLEX_STREAMED
        if subset is not None:
            message.metadata_context.filter_metadata[headers.SUBSET_NAMESPACE].update({headers.SUBSET: subset})
        await self.call.write(message)
        if raw:
            await self.call.write(ProcessingRequest(request_body=HttpBody(body=raw, end_of_stream=True)))
        return await self.call.read()

    async def respond(self, status: int = 200, served: str | None = None, **fields: str) -> dict[str, str]:
        """Sends response headers; returns what is added to them."""
        chunk = await self.call.read()
        assert chunk.WhichOneof("response") == "request_body"
        message = ProcessingRequest(response_headers=HttpHeaders())
        for name, value in {":status": str(status), **fields}.items():
            message.response_headers.headers.headers.add(key=name, raw_value=value.encode())
        if served is not None:
            message.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": served})
        await self.call.write(message)
        answer = await self.call.read()
        mutation = answer.response_headers.response.header_mutation
        assert list(mutation.remove_headers) == [headers.LOAD]
        return {o.header.key: o.header.raw_value.decode() for o in mutation.set_headers}

    async def end(self) -> None:
        await self.call.done_writing()
        assert await self.call.read() is grpc.aio.EOF  # type: ignore[attr-defined]


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": PROMPT, **fields}


def destinations(answer: ProcessingResponse) -> list[str]:
    sets = answer.request_headers.response.header_mutation.set_headers
    values = {o.header.key: o.header.raw_value.decode() for o in sets}
    assert values[headers.POOL] == "ns/tiny/p"
    return values[headers.DESTINATION].split(",")


def error(answer: ProcessingResponse) -> tuple[int, str, dict[str, Any], dict[str, str]]:
    """Status, reason, error object, headers."""
    immediate = answer.immediate_response
    sets = {o.header.key: o.header.raw_value.decode() for o in immediate.headers.set_headers}
    assert sets["content-type"] == "application/json"
    return immediate.status.code, sets[headers.REASON], orjson.loads(immediate.body)["error"], sets


@pytest.mark.req("RT-20", "RT-22")
async def test_a_request_goes_where_its_prefix_is_and_says_why(world: World) -> None:
    await world.ready()
    tokens = TOKENIZER.encode(PROMPT).ids
    hashes = BlockHasher(16, "penstock").hash(tokens)
    world.state.event(key_of(world.replicas[1]), BlockStored(hashes), 0.0)
    for _ in range(3):
        stream = Stream(world)
        answer = await stream.ask(completion(), **{headers.DECISION: "explain"})
        assert destinations(answer) == [world.replicas[1].endpoint, world.replicas[0].endpoint]
        added = await stream.respond()
        assert added[headers.REPLICA] == "u1"
        assert "63 of 64 prompt tokens are resident at r1" in added[headers.DECISION]
        await stream.end()
    decisions = await world.get("/debug/decisions?n=2")
    assert [d["picked"] for d in decisions] == ["r1", "r1"]
    assert decisions[0]["candidates"][0]["resident_tokens"] == 63
    assert decisions[0]["candidates"][1]["terms"]["prefill_s"] == pytest.approx(0.064)


async def test_simultaneous_requests_spread(world: World) -> None:
    await world.ready()
    streams = [Stream(world) for _ in range(20)]
    picked = [destinations(await stream.ask(completion()))[0] for stream in streams]
    assert min(picked.count(r.endpoint) for r in world.replicas) >= 7
    for stream in streams:
        stream.call.cancel()
    await until(lambda: world.state.bookings.released["reset"] == 20)
    assert all(world.state.bookings.count(key_of(r)) == 0 for r in world.replicas)


@pytest.mark.req("RT-16", "RT-44")
async def test_a_stream_is_booked_until_its_report_and_runs_until_its_end(world: World) -> None:
    await world.ready()
    stream = Stream(world)
    first, second = destinations(await stream.ask(completion(stream=True)))
    picked, other = sorted(world.replicas, key=lambda r: r.endpoint != first)
    assert world.state.bookings.outstanding(key_of(picked)).prefill_tokens == 64
    report = LoadReport(epoch=1, seq=50, num_requests_running=1)
    await stream.respond(served=second, **{"content-type": "text/event-stream", headers.LOAD: load_report.encode(report, "TEXT")})
    await stream.end()  # of the exchange, not of the answer
    assert world.state.bookings.outstanding(key_of(picked)).requests == 0
    assert world.state.bookings.outstanding(key_of(other)).requests == 0
    heard = world.state.reports.get(key_of(other))
    assert heard is not None
    assert heard.report == report
    view = msgspec.convert(await world.get("/pools"), PoolsView)
    loads = {load.uid: load for load in view.pools[0].replicas}
    assert (loads[other.uid].in_flight, loads[other.uid].pending, loads[picked.uid].in_flight) == (1, 0, 0)
    # The one that did not answer is now the last resort.
    following = Stream(world)
    assert destinations(await following.ask(completion()))[0] == second
    following.call.cancel()


@pytest.mark.parametrize(
    ("body", "status", "reason", "param", "words"),
    [
        (b"\xff" * 3_000_000, 400, "invalid_json", None, "not JSON"),
        (b"[]", 400, "invalid_body", None, "JSON object"),
        (b"{}", 400, "missing_model", "model", "model is missing"),
        (b'{"model": 7}', 400, "invalid_type", "model", "string"),
        (b'{"model": "huge"}', 404, "model_not_found", "model", "there are: alias, tiny"),
    ],
)
async def test_bad_requests(world: World, body: bytes, status: int, reason: str, param: str, words: str) -> None:
    await world.ready()
    stream = Stream(world)
    got_status, got_reason, content, _ = error(await stream.ask(body))
    assert (got_status, got_reason, content["param"]) == (status, reason, param)
    assert words in content["message"]
    assert content["type"] == "invalid_request_error"


async def test_models_come_from_the_fleet_and_other_paths_do_not_exist(world: World) -> None:
    await world.ready()
    answer = await Stream(world).ask(path="/v1/models?x=1")
    listed = orjson.loads(answer.immediate_response.body)
    assert answer.immediate_response.status.code == 200
    assert [m["id"] for m in listed["data"]] == ["tiny", "alias"]
    assert listed["data"][0]["created"] == 7
    assert error(await Stream(world).ask(path="/metrics"))[:2] == (404, "unknown_path")
    assert error(await Stream(world).ask(path="/v1/completions"))[:2] == (405, "method_not_allowed")


@pytest.mark.req("RT-31")
async def test_a_prompt_that_cannot_be_tokenised_is_still_routed(world: World) -> None:
    await world.ready()
    stream = Stream(world)
    assert len(destinations(await stream.ask(completion(prompt={"not": "a prompt"})))) == 2
    decision = (await world.get("/debug/decisions"))[0]
    assert "prompt must be" in decision["tokens_unknown"]
    assert any("chosen without residency" in reason for reason in decision["reasons"])
    stream.call.cancel()


async def test_a_request_is_held_until_a_replica_is_ready_and_wakes_the_autoscaler(world: World) -> None:
    world.fleet()
    await until(lambda: world.state.model("tiny"))
    before = await world.get("/pools")
    waiting = asyncio.create_task(world.get(f"/pools?after={before['version']}&timeout=10"))
    asked = asyncio.create_task(Stream(world).ask(completion(model="alias")))
    view = await waiting
    assert view["pools"][0]["held"] == 1
    assert not asked.done()
    unready = msgspec.structs.replace(world.replicas[0], ready=False)
    world.fleet(unready)
    await until(lambda: world.state.replicas())
    assert not asked.done()
    world.fleet(world.replicas[0])
    assert destinations(await asked) == [world.replicas[0].endpoint]
    assert (await world.get("/pools"))["pools"][0]["held"] == 0


async def test_a_held_request_is_refused_in_time_and_forgotten_when_its_client_goes(world: World) -> None:
    world.fleet(hold_timeout_s=0.3)
    await until(lambda: world.state.model("tiny"))
    status, reason, content, sets = error(await Stream(world).ask(completion()))
    assert (status, reason, sets["retry-after"]) == (503, "no_ready_replica", "5")
    assert "'tiny' has no ready replica" in content["message"]
    world.fleet(hold_timeout_s=60)
    await until(lambda: world.state.model("tiny").hold_timeout_s == 60)  # type: ignore[union-attr]
    stream = Stream(world)
    asked = asyncio.create_task(stream.ask(completion()))
    await until(lambda: world.state.held)
    stream.call.cancel()
    await until(lambda: not world.state.held)
    asked.cancel()


@pytest.mark.req("RT-41")
async def test_a_subset_never_fails_open(world: World) -> None:
    await world.ready()
    only = world.replicas[1].endpoint
    stream = Stream(world)
    assert destinations(await stream.ask(completion(), subset=[only])) == [only]
    stream.call.cancel()
    for subset in ([], "10.9.9.9", 7):
        assert error(await Stream(world).ask(completion(), subset=subset))[:2] == (503, "no_ready_replica")


async def test_a_restarted_engine_is_noticed_by_polling(world: World) -> None:
    await world.ready()
    key = key_of(world.replicas[0])
    world.state.event(key, BlockStored([b"x" * 32]), 0.0)
    seen = world.engines[0].bundles
    world.engines[0].report = msgspec.structs.replace(world.engines[0].report, epoch=2)
    await until(lambda: world.state.residency.blocks(key) == 0)
    await until(lambda: world.engines[0].bundles > seen)


async def test_health_readiness_and_metrics(world: World) -> None:
    health = HealthStub(world.channel)

    async def status(name: str) -> int:
        return (await health.Check(HealthCheckRequest(service=name))).status

    names = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "inference-extension")
    assert {await status(name) for name in names} == {HealthCheckResponse.NOT_SERVING}
    assert await status("liveness") == HealthCheckResponse.SERVING
    async with world.http.get("/readyz") as response:
        assert response.status == 503
    await world.ready()
    assert {await status(name) for name in names} == {HealthCheckResponse.SERVING}
    async with world.http.get("/readyz") as ready, world.http.get("/healthz") as alive:
        assert (ready.status, alive.status) == (200, 200)
    stream = Stream(world)
    await stream.ask(completion())
    await stream.respond(status=200)
    await Stream(world).ask(b"{}")
    async with world.http.get("/metrics") as response:
        text = await response.text()
    assert 'penstock_picker_picks_total{policy="Cost",pool="ns/tiny/p"} 1.0' in text
    assert 'penstock_picker_booking_released_total{by="answered"} 1.0' in text
    assert 'penstock_picker_refusals_total{reason="missing_model"} 1.0' in text
    assert 'penstock_picker_load_report_age_seconds{replica="r0"}' in text
    async with world.http.get("/pools?after=soon") as response:
        assert response.status == 400


async def test_stopping_waits_for_requests_without_an_answer_and_refuses_held_ones(world: World) -> None:
    await world.ready()
    routed = Stream(world)
    await routed.ask(completion())
    world.fleet(hold_timeout_s=60)
    await until(lambda: not world.state.replicas())
    held = asyncio.create_task(Stream(world).ask(completion()))
    await until(lambda: world.state.held)
    world.stop.set()
    status, reason, _, _ = error(await held)
    assert (status, reason) == (503, "shutting_down")
    assert not world.task.done()
    await routed.respond()
    await routed.end()
    await asyncio.wait_for(asyncio.shield(world.task), 5)


async def test_a_new_replica_is_picked_only_when_every_envoy_knows_it(world: World) -> None:
    ads = AggregatedDiscoveryServiceStub(world.channel).StreamAggregatedResources()
    clusters = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
    endpoints = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
    await ads.write(DiscoveryRequest(type_url=clusters))
    world.fleet()
    response = await ads.read()
    await ads.write(DiscoveryRequest(type_url=clusters, version_info=response.version_info, response_nonce=response.nonce))
    await ads.write(DiscoveryRequest(type_url=endpoints, resource_names=["ns/tiny/p"]))
    response = await ads.read()
    acknowledged = DiscoveryRequest(type_url=endpoints, resource_names=["ns/tiny/p"], response_nonce=response.nonce)
    acknowledged.version_info = response.version_info
    await ads.write(acknowledged)
    asked = asyncio.create_task(Stream(world).ask(completion()))
    await until(lambda: world.state.held)
    world.fleet(world.replicas[0])
    response = await ads.read()
    await asyncio.sleep(0.2)
    assert not asked.done()
    acknowledged.version_info, acknowledged.response_nonce = response.version_info, response.nonce
    await ads.write(acknowledged)
    assert destinations(await asyncio.wait_for(asked, 1.0)) == [world.replicas[0].endpoint]
    ads.cancel()


async def test_a_failing_background_task_ends_the_gateway_with_its_error() -> None:
    class Broken:
        async def watch(self) -> AsyncIterator[Fleet]:
            raise ValueError("no such fleet")
            yield

    settings = GatewaySettings(
        name="gw", host="127.0.0.1", grpc_port=0, http_port=0, listener=ListenerSettings(host="127.0.0.1", port=1)
    )
    with pytest.raises(ValueError, match="no such fleet"):
        await Gateway(settings, Broken()).run(asyncio.Event())
