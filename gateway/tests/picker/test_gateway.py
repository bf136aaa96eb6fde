"""The whole gateway process over its sockets: a raw gRPC client in Envoy's place, small HTTP servers in the engines'."""

import asyncio
import gc
import socket
import sys
import time
from collections.abc import AsyncIterator
from importlib.metadata import version
from types import ModuleType
from typing import Any

import grpc
import msgspec
import orjson
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from penstock.api import headers, load_report
from penstock.api.events import BlockStored
from penstock.api.fleet import Fleet, PoolsView
from penstock.api.load_report import LoadReport
from penstock.gateway._pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from penstock.gateway._pb.envoy.service.discovery.v3.ads_pb2_grpc import AggregatedDiscoveryServiceStub
from penstock.gateway._pb.envoy.service.discovery.v3.discovery_pb2 import DeltaDiscoveryRequest
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, HttpHeaders, ProcessingRequest
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub
from penstock.gateway.cli import gateway as gateway_command
from penstock.gateway.extproc.body import MAX_BODY_BYTES
from penstock.gateway.extproc.health import READINESS
from penstock.gateway.picker.candidates import key_of
from penstock.gateway.picker.compiled import MODULE, Compiled, installed, name_of
from penstock.gateway.picker.request import RequestView
from penstock.gateway.process import Gateway, GatewaySettings
from penstock.gateway.xds.listener import ListenerSettings
from penstock.prompt.hashing import BlockHasher


@pytest.fixture(params=["lean", "grpc"])
def ext_proc(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.req("RT-20", "RT-22")
async def test_a_request_goes_where_its_prefix_is_and_says_why(world: Any) -> None:
    await world.ready()
    tokens = world.prompt_tokens
    hashes = BlockHasher(16, "penstock").hash(tokens)
    world.state.event(key_of(world.replicas[1]), BlockStored(hashes), 0.0)
    for _ in range(3):
        stream = world.stream()
        answer = await stream.ask(world.completion(), **{headers.DECISION: "explain"})
        assert world.destinations(answer) == [world.replicas[1].endpoint, world.replicas[0].endpoint]
        added = await stream.respond()
        assert added[headers.REPLICA] == "u1"
        assert "48 of 64 prompt tokens are resident at r1" in added[headers.DECISION]
        await stream.end()
    assert len(await world.get("/debug/decisions?n=1e300")) > 1
    decisions = await world.get("/debug/decisions?n=2")
    assert [d["picked"] for d in decisions] == ["r1", "r1"]
    assert decisions[0]["candidates"][0]["resident_tokens"] == 48
    assert decisions[0]["candidates"][1]["terms"]["prefill_s"] == pytest.approx(0.064)


async def test_the_package_takes_in_usual_heads_where_it_is(world: Any, compiled: Compiled | None) -> None:
    assert (world.gateway._extproc.director.usual_heads is None) == (compiled is None)


async def test_simultaneous_requests_spread(world: Any) -> None:
    await world.ready()
    streams = [world.stream() for _ in range(20)]
    picked = [world.destinations(await stream.ask(world.completion()))[0] for stream in streams]
    assert min(picked.count(r.endpoint) for r in world.replicas) >= 7
    for stream in streams:
        stream.call.cancel()
    await world.until(lambda: world.state.bookings.released["reset"] == 20)
    assert all(world.state.bookings.count(key_of(r)) == 0 for r in world.replicas)


@pytest.mark.req("RT-16")
async def test_a_stream_is_booked_until_its_report_and_runs_until_its_end(world: Any) -> None:
    await world.ready()
    stream = world.stream()
    first, second = world.destinations(await stream.ask(world.completion(stream=True)))
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
    following = world.stream()
    assert world.destinations(await following.ask(world.completion()))[0] == second
    following.call.cancel()


async def test_a_connection_lives_through_an_envoys_pings(world: Any) -> None:
    """gRPC's own limit is two pings of an idle peer. Frames by hand, since clients of gRPC keep to that limit."""
    settings, ping, goaway = 4, 6, 7
    reader, writer = await asyncio.open_connection("127.0.0.1", world.gateway.grpc_port)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, settings, 0, 0, 0, 0, 0]))
    kinds: list[int] = []
    async with asyncio.timeout(60):
        for number in range(6):
            writer.write(bytes([0, 0, 8, ping, 0, 0, 0, 0, 0]) + number.to_bytes(8, "big"))
            while kinds.count(ping) <= number and goaway not in kinds:
                head = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(head[:3], "big"))
                kinds.append(head[3])
    writer.close()
    assert goaway not in kinds


@pytest.mark.parametrize("encoding", ["gzip", "br"])
async def test_encoded_bodies_are_refused_by_name(world: Any, encoding: str) -> None:
    await world.ready()
    answer = await world.stream().ask(world.completion(), **{"content-encoding": encoding})
    status, reason, content, sets = world.error(answer)
    assert (status, reason, content["param"]) == (415, "unsupported_encoding", "content-encoding")
    assert sets["accept-encoding"] == "identity", "RFC 9110, section 15.5.16"
    assert encoding in content["message"] and content["type"] == "invalid_request_error"
    for plain in ("", "identity", "Identity"):
        assert world.destinations(await world.stream().ask(world.completion(), **{"content-encoding": plain}))


async def test_a_length_that_is_too_large_is_refused_before_the_body(world: Any) -> None:
    await world.ready()
    for length, refused in (
        (MAX_BODY_BYTES + 1, True),
        (MAX_BODY_BYTES, False),
        ("9" * 5_000, False),
        ("many", False),
        ("²", False),
    ):
        answer = await world.stream().ask(world.completion(), **{"content-length": str(length)})
        assert answer.HasField("immediate_response") is refused
        if refused:
            assert world.error(answer)[:2] == (413, "body_too_large")


def test_a_port_that_is_none_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--grpc-port", "--http-port", "--listener-port"):
        with pytest.raises(SystemExit, match="2"):
            gateway_command([f"{flag}=65536"])
        assert f"argument {flag}: '65536' is not a port" in capsys.readouterr().err


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
async def test_bad_requests(world: Any, body: bytes, status: int, reason: str, param: str, words: str) -> None:
    await world.ready()
    stream = world.stream()
    got_status, got_reason, content, _ = world.error(await stream.ask(body))
    assert (got_status, got_reason, content["param"]) == (status, reason, param)
    assert words in content["message"]
    assert content["type"] == "invalid_request_error"


async def test_models_come_from_the_fleet_and_other_paths_do_not_exist(world: Any) -> None:
    await world.ready()
    answer = await world.stream().ask(path="/v1/models?x=1")
    listed = orjson.loads(answer.immediate_response.body)
    assert answer.immediate_response.status.code == 200
    assert [m["id"] for m in listed["data"]] == ["tiny", "alias"]
    assert listed["data"][0]["created"] == 7
    one = await world.stream().ask(path="/v1/models/alias")
    assert orjson.loads(one.immediate_response.body) == listed["data"][1]
    assert world.error(await world.stream().ask(path="/v1/models/none"))[:2] == (404, "model_not_found")
    assert world.error(await world.stream().ask(path="/metrics"))[:2] == (404, "unknown_path")
    status, reason, _, sets = world.error(await world.stream().ask(path="/v1/completions"))
    assert (status, reason, sets["allow"]) == (405, "method_not_allowed", "POST")
    _, _, _, sets = world.error(await world.stream().ask(path="/v1/models", **{":method": "DELETE"}))
    assert sets["allow"] == "GET, HEAD"
    head = await world.stream().ask(path="/v1/models", **{":method": "HEAD"})
    assert head.immediate_response.status.code == 200


@pytest.mark.req("RT-31")
async def test_a_prompt_that_cannot_be_tokenised_is_still_routed(world: Any) -> None:
    await world.ready()
    stream = world.stream()
    assert len(world.destinations(await stream.ask(world.completion(prompt={"not": "a prompt"})))) == 2
    decision = (await world.get("/debug/decisions"))[0]
    assert "prompt must be" in decision["tokens_unknown"]
    assert any("chosen without residency" in reason for reason in decision["reasons"])
    stream.call.cancel()


async def test_a_request_is_held_until_a_replica_is_ready_and_wakes_the_autoscaler(world: Any) -> None:
    world.fleet()
    await world.until(lambda: world.state.directory.names.get("tiny"))
    before = await world.get("/pools")
    waiting = asyncio.create_task(world.get(f"/pools?after={before['version']}&timeout=10"))
    asked = asyncio.create_task(world.stream().ask(world.completion(model="alias")))
    view = await waiting
    assert view["pools"][0]["held"] == 1
    assert not asked.done()
    unready = msgspec.structs.replace(world.replicas[0], ready=False)
    world.fleet(unready)
    await world.until(lambda: world.state.directory.replicas)
    assert not asked.done()
    world.fleet(world.replicas[0])
    assert world.destinations(await asked) == [world.replicas[0].endpoint]
    assert (await world.get("/pools"))["pools"][0]["held"] == 0


async def test_a_held_request_is_refused_in_time_and_forgotten_when_its_client_goes(world: Any) -> None:
    world.fleet(hold_timeout_s=0.3)
    await world.until(lambda: world.state.directory.names.get("tiny"))
    status, reason, content, sets = world.error(await world.stream().ask(world.completion()))
    assert (status, reason, sets["retry-after"]) == (503, "no_ready_replica", "30")  # a start has not been seen yet
    assert "'tiny' has no ready replica" in content["message"]
    world.fleet(hold_timeout_s=60)
    await world.until(lambda: world.state.directory.names.get("tiny").model.hold_timeout_s == 60)  # type: ignore[union-attr]
    stream = world.stream()
    asked = asyncio.create_task(stream.ask(world.completion()))
    await world.until(lambda: world.state.held)
    stream.call.cancel()
    await world.until(lambda: not world.state.held)
    asked.cancel()


@pytest.mark.req("RT-41")
async def test_a_subset_never_fails_open(world: Any) -> None:
    await world.ready()
    only = world.replicas[1].endpoint
    stream = world.stream()
    assert world.destinations(await stream.ask(world.completion(), subset=[only])) == [only]
    stream.call.cancel()
    for subset in ([], "10.9.9.9", 7):
        assert world.error(await world.stream().ask(world.completion(), subset=subset))[:2] == (503, "no_ready_replica")


async def test_a_restarted_engine_is_noticed_by_polling(world: Any) -> None:
    await world.ready()
    key = key_of(world.replicas[0])
    world.state.event(key, BlockStored([b"x" * 32]), 0.0)
    seen = world.engines[0].bundles
    world.engines[0].report = msgspec.structs.replace(world.engines[0].report, epoch=2)
    await world.until(lambda: world.state.residency.blocks(key) == 0)
    await world.until(lambda: world.engines[0].bundles > seen)


async def test_all_names_of_health_are_listed(world: Any) -> None:
    await world.ready()
    listed = (await HealthStub(world.channel).List(HealthListRequest())).statuses
    assert set(listed) == {"liveness", *READINESS}
    assert {it.status for it in listed.values()} == {HealthCheckResponse.SERVING}


async def test_health_readiness_and_metrics(world: Any, compiled: Compiled | None) -> None:
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
    stream = world.stream()
    await stream.ask(world.completion())
    await stream.respond(status=200)
    await world.stream().ask(b"{}")
    async with world.http.get("/metrics") as response:
        text = await response.text()
    assert 'penstock_picker_picks_total{policy="Cost",pool="ns/tiny/p"} 1.0' in text
    assert 'penstock_picker_booking_released_total{by="answered"} 1.0' in text
    assert 'penstock_picker_refusals_total{reason="missing_model"} 1.0' in text
    assert 'penstock_picker_load_report_age_seconds{replica="r0"}' in text
    async with world.http.get("/version") as response:
        told = await response.json()
    assert told == {"version": version("penstock"), "picks": name_of(compiled)}
    assert f'penstock_gateway_info{{picks="{told["picks"]}",version="{told["version"]}"}} 1.0' in text
    async with world.http.get("/pools?after=soon") as response:
        assert response.status == 400


async def test_stopping_waits_for_requests_without_an_answer_and_hands_on_held_ones(world: Any) -> None:
    await world.ready()
    routed = world.stream()
    await routed.ask(world.completion())
    world.fleet(hold_timeout_s=60)
    await world.until(lambda: not world.state.directory.replicas)
    held = asyncio.create_task(world.stream().ask(world.completion()))
    await world.until(lambda: world.state.held)
    world.stop.set()
    with pytest.raises(grpc.aio.AioRpcError) as handed_on:  # our own Envoy then asks the next gateway
        await held
    assert handed_on.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not world.task.done()
    await routed.respond()
    await routed.end()
    await asyncio.wait_for(asyncio.shield(world.task), 60)


async def test_a_new_replica_is_picked_only_when_every_envoy_knows_it(world: Any) -> None:
    ads = AggregatedDiscoveryServiceStub(world.channel).DeltaAggregatedResources()
    clusters = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
    endpoints = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"

    async def take(response: Any) -> None:
        await ads.write(DeltaDiscoveryRequest(type_url=response.type_url, response_nonce=response.nonce))

    await ads.write(DeltaDiscoveryRequest(type_url=clusters))
    world.fleet()
    await take(await ads.read())
    await ads.write(DeltaDiscoveryRequest(type_url=endpoints, resource_names_subscribe=["ns/tiny/p"]))
    await take(await ads.read())
    asked = asyncio.create_task(world.stream().ask(world.completion()))
    await world.until(lambda: world.state.held)
    world.fleet(world.replicas[0])
    response = await ads.read()
    assert response.type_url == endpoints and [resource.name for resource in response.resources] == ["ns/tiny/p"]
    await asyncio.sleep(0.2)
    assert not asked.done()
    await take(response)
    assert world.destinations(await asyncio.wait_for(asked, 60)) == [world.replicas[0].endpoint]
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


async def test_who_waits_keeps_bytes_and_not_what_was_read_of_them(world: Any) -> None:
    """Or a tenant could fill the memory with a twentieth of it."""
    await world.ready()
    world.fleet(hold_timeout_s=20.0)
    await world.until(lambda: not world.state.directory.replicas)
    body = b'{"model":"tiny","prompt":"w1 w2","metadata":[' + b"[],[1]," * 50_000 + b"0]}"

    def lists() -> int:
        gc.collect()
        return sum(type(it) is list for it in gc.get_objects())

    before = lists()
    stream = world.stream()
    asked = asyncio.ensure_future(stream.ask(body))
    await world.until(lambda: world.state.held == {"ns/tiny": 1})
    assert lists() < before + 10_000
    world.fleet(*world.replicas)
    assert world.destinations(await asked)
    assert (await world.get("/debug/decisions?n=1"))[0]["prompt_tokens"] == 2
    stream.call.cancel()


async def test_a_held_request_for_a_model_that_is_deleted_is_404(world: Any) -> None:
    world.fleet(hold_timeout_s=60)
    await world.until(lambda: world.state.directory.names.get("tiny"))
    asked = asyncio.create_task(world.stream().ask(world.completion()))
    await world.until(lambda: world.state.held)
    world.discovery.queue.put_nowait(Fleet())
    assert world.error(await asyncio.wait_for(asked, 60))[:2] == (404, "model_not_found")
    assert not world.state.held


async def test_a_replica_that_cannot_be_reached_is_the_last_resort(world: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        dead = msgspec.structs.replace(world.replicas[0], uid="dead", name="dead", port=probe.getsockname()[1])
    world.fleet(dead, world.replicas[1])
    view = RequestView(id="", path="", model="tiny", prompts=())

    def ejected() -> bool:
        named = world.state.directory.names.get("tiny")
        return named is not None and world.state.slates.of(named.model, view, time.monotonic()).last_resorts is not None

    await world.until(ejected)
    for _ in range(3):
        stream = world.stream()
        assert world.destinations(await stream.ask(world.completion())) == [world.replicas[1].endpoint, dead.endpoint]
        stream.call.cancel()


async def test_a_request_without_an_id_gets_one(world: Any) -> None:
    await world.ready()
    for given, expected in (({}, 32), ({"x-request-id": "mine"}, None)):
        stream = world.stream()
        answer = await stream.ask(world.completion(), **given)
        sets = {o.header.key: o.header.raw_value for o in answer.request_headers.response.header_mutation.set_headers}
        assert (len(sets[headers.REQUEST_ID]) if headers.REQUEST_ID in sets else None) == expected
        stream.call.cancel()


async def test_a_buffered_body_of_many_megabytes_is_one_message(world: Any) -> None:
    await world.ready()
    call = ExternalProcessorStub(world.channel).Process()
    message = ProcessingRequest(request_headers=HttpHeaders())
    for name, value in {":method": "POST", ":path": "/v1/completions", "x-request-id": "r"}.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    message.protocol_config.request_body_mode = ProcessingMode.BUFFERED
    await call.write(message)
    assert (await call.read()).WhichOneof("response") == "request_headers"
    body = orjson.dumps(world.completion(prompt="x" * 10_000_000))
    await call.write(ProcessingRequest(request_body=HttpBody(body=body, end_of_stream=True)))
    answer = await call.read()
    assert answer.request_body.response.clear_route_cache
    call.cancel()


def test_what_an_uninstalled_package_has_left_makes_no_picks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, MODULE, ModuleType(MODULE))
    assert installed() is None
    assert "without a version is of another version" in caplog.text
