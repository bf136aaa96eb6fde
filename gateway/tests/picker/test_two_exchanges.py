"""A request and its response on exchanges of their own, as our own Envoys ask: nothing is freed between the two."""

import asyncio
from typing import Any

import msgspec
import pytest

from penstock.api import headers, load_report
from penstock.gateway._pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from penstock.gateway._pb.envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from penstock.gateway._pb.envoy.service.accesslog.v3.als_pb2_grpc import AccessLogServiceStub
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, HttpHeaders, ProcessingRequest
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub
from penstock.gateway.extproc import access_log
from penstock.gateway.picker.bookings import State


@pytest.fixture(params=["lean", "grpc"])
def ext_proc(request: pytest.FixtureRequest) -> str:
    return request.param


def head(**fields: str) -> HttpHeaders:
    its = HttpHeaders()
    for name, value in fields.items():
        its.headers.headers.add(key=name, raw_value=value.encode())
    return its


async def request(world: Any, body: bytes = b'{"model": "tiny", "prompt": "w1", "stream": true}') -> tuple[Any, dict[str, Any]]:
    """Sends a request until the picker ends the exchange; returns its first answer and what it notes of the request."""
    call = ExternalProcessorStub(world.channel).Process(metadata=((headers.PHASE, headers.REQUEST_PHASE),))
    fields = {":method": "POST", ":path": "/v1/completions", headers.DECISION: "explain"}
    message = ProcessingRequest(request_headers=head(**fields))
    message.protocol_config.request_body_mode = ProcessingMode.FULL_DUPLEX_STREAMED
    await call.write(message)
    await call.write(ProcessingRequest(request_body=HttpBody(body=body, end_of_stream=True)))
    answers = [answer async for answer in call]
    if answers[0].HasField("immediate_response"):
        return answers[0], {}
    assert [it.WhichOneof("response") for it in answers] == ["request_headers", "request_body"]
    return answers[0], dict(answers[0].dynamic_metadata.fields[headers.LOG_NAMESPACE].struct_value.items())


async def response(world: Any, noted: dict[str, Any], served: str, **fields: str) -> dict[str, str]:
    """Sends the head of a response; returns what is added to it."""
    call = ExternalProcessorStub(world.channel).Process()
    message = ProcessingRequest(response_headers=head(**{":status": "200", **fields}))
    if noted:
        message.metadata_context.filter_metadata[headers.LOG_NAMESPACE].update(noted)
    message.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": served})
    await call.write(message)
    (answer,) = [answer async for answer in call]
    mutation = answer.response_headers.response.header_mutation
    assert list(mutation.remove_headers) == list(headers.LOADS)
    return {it.header.key: it.header.raw_value.decode() for it in mutation.set_headers}


def report_of(world: Any, which: int, **changes: Any) -> str:
    return load_report.encode(msgspec.structs.replace(world.engines[which].report, **changes), "TEXT")


async def test_a_booking_is_pending_until_the_response_and_follows_who_answered(world: Any) -> None:
    await world.ready()
    answer, noted = await request(world)
    (picked, other) = world.destinations(answer)
    bookings = world.state.bookings
    assert bookings.total(State.PENDING) == 1, "the end of its exchange frees nothing"
    event_stream = {"content-type": "text/event-stream"}
    added = await response(world, noted, other, **event_stream, **{headers.LOAD: report_of(world, 0, seq=9)})
    assert (bookings.total(State.PENDING), bookings.total(State.UNREPORTED) + bookings.total(State.RUNNING)) == (0, 1)
    assert added[headers.REPLICA] == world.state.directory.key_at(other).uid
    assert added[headers.MODEL] == "tiny" and added[headers.DECISION]
    assert bookings.count(world.state.directory.key_at(picked)) == 0 and not bookings.released


async def test_what_another_gateway_has_picked_teaches_us_of_the_replica(world: Any) -> None:
    await world.ready()
    key = world.state.directory.key_at(world.replicas[1].endpoint)
    noted = {headers.BOOKING: "other-1", headers.NAME: "tiny", "model": "ns/tiny"}
    report = report_of(world, 1, epoch=1, seq=77, num_requests_running=5)
    added = await response(world, noted, world.replicas[1].endpoint, **{headers.LOAD: report})
    assert added == {headers.REPLICA: key.uid, headers.MODEL: "tiny"}
    assert world.state.reports.get(key).report.num_requests_running == 5
    async with world.http.get("/metrics") as scraped:
        assert 'penstock_gateway_requests_total{code="200",model="ns/tiny"} 1.0' in await scraped.text()
    for _ in range(5):
        await response(world, noted, world.replicas[1].endpoint, **{":status": "500"})
    assert world.state.outliers.ejections == 1
    assert await response(world, noted, "10.9.9.9:1") == {}
    assert not world.state.bookings.released


async def shown(world: Any, noted: dict[str, Any], served: str, **fields: str) -> None:
    """Shows the head of a response as our own Envoys do, who wait for nothing."""
    call = ExternalProcessorStub(world.channel).Process()
    message = ProcessingRequest(response_headers=head(**{":status": "200", **fields}), observability_mode=True)
    message.metadata_context.filter_metadata[headers.LOG_NAMESPACE].update(noted)
    message.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": served})
    await call.write(message)
    assert [answer async for answer in call] == []


def ended(*noted: dict[str, Any], code: int) -> StreamAccessLogsMessage:
    """What Envoy says of the ends of requests."""
    told = StreamAccessLogsMessage()
    for its in noted:
        entry = told.http_logs.log_entry.add()
        entry.response.response_code.value = code
        entry.common_properties.metadata.filter_metadata[headers.LOG_NAMESPACE].update(its)
    return told


async def test_a_head_that_is_only_shown_counts_as_one_that_is_asked_about(world: Any) -> None:
    await world.ready()
    answer, noted = await request(world)
    assert noted[headers.NAME] == "tiny" and "r0" in noted[headers.REASONS], "what Envoy tells the client"
    picked = world.destinations(answer)[0]
    report = report_of(world, 0, seq=9, num_requests_running=5)
    await shown(world, noted, picked, **{"content-type": "text/event-stream", headers.LOAD: report})
    bookings, key = world.state.bookings, world.state.directory.key_at(picked)
    assert (bookings.total(State.PENDING), bookings.count(key)) == (0, 1)
    assert world.state.reports.get(key).report.num_requests_running == 5


async def test_an_end_that_overtakes_its_head_waits_for_it(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.ready()
    (first, one), (second, other) = [await request(world) for _ in range(2)]
    await shown(world, other, world.destinations(second)[0], **{"content-type": "text/event-stream"})
    monkeypatch.setattr(access_log, "HEAD_S", 3600.0)
    bookings = world.state.bookings
    call = AccessLogServiceStub(world.channel).StreamAccessLogs()
    await call.write(ended(one, other, code=200))
    await world.until(lambda: bookings.released["access_log"] == 1)
    assert bookings.total(State.PENDING) == 1
    await shown(world, one, world.destinations(first)[0])
    assert bookings.released == {"access_log": 1, "answered": 1}
    async with world.http.get("/metrics") as scraped:
        assert 'penstock_gateway_requests_total{code="200",model="ns/tiny"} 2.0' in await scraped.text()


@pytest.mark.parametrize(("code", "counted"), [(200, "200"), (0, "reset")])
async def test_an_end_whose_head_never_comes_counts_before_long(
    world: Any, monkeypatch: pytest.MonkeyPatch, code: int, counted: str
) -> None:
    await world.ready()
    _, noted = await request(world)
    monkeypatch.setattr(access_log, "HEAD_S", 0.0)
    call = AccessLogServiceStub(world.channel).StreamAccessLogs()
    await call.write(ended(noted, code=code))
    await world.until(lambda: world.state.bookings.released["access_log"] == 1)
    async with world.http.get("/metrics") as scraped:
        assert f'penstock_gateway_requests_total{{code="{counted}",model="ns/tiny"}} 1.0' in await scraped.text()


async def test_a_head_that_comes_too_late_for_its_end_counts_once(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.ready()
    answer, noted = await request(world)
    picked = world.destinations(answer)[0]
    monkeypatch.setattr(access_log, "HEAD_S", 0.0)
    call = AccessLogServiceStub(world.channel).StreamAccessLogs()
    await call.write(ended(noted, code=200))
    await world.until(lambda: world.state.bookings.released["access_log"] == 1)
    which = next(n for n, replica in enumerate(world.replicas) if replica.endpoint == picked)
    await shown(world, noted, picked, **{headers.LOAD: report_of(world, which, seq=9, num_requests_running=5)})
    assert world.state.reports.get(world.state.directory.key_at(picked)).report.num_requests_running == 5, "what it says counts"
    async with world.http.get("/metrics") as scraped:
        assert 'penstock_gateway_requests_total{code="200",model="ns/tiny"} 1.0' in await scraped.text()


async def test_what_another_says_is_not_taken_for_the_words_of_a_pick_that_is_gone(world: Any) -> None:
    await world.ready()
    answer, noted = await request(world)
    gone, other = (world.state.directory.key_at(it) for it in world.destinations(answer))
    world.state.bookings.release_all(gone, "replica_gone")
    heard = world.state.reports.get(gone)
    which = next(n for n, replica in enumerate(world.replicas) if world.state.directory.key_at(replica.endpoint) == other)
    report = report_of(world, which, seq=99, num_requests_running=5)
    added = await response(world, noted, world.destinations(answer)[1], **{headers.LOAD: report})
    assert added[headers.REPLICA] == other.uid
    assert world.state.reports.get(other).report.num_requests_running == 5
    assert world.state.reports.get(gone) == heard


async def test_the_gateways_own_answers_are_nobodys(world: Any) -> None:
    await world.ready()
    answer, _ = await request(world, b"{}")
    assert world.error(answer)[0] == 400
    assert await response(world, {}, "") == {}


async def test_a_client_that_goes_while_it_is_decided_leaves_nothing(world: Any) -> None:
    world.fleet(hold_timeout_s=30)
    await world.until(lambda: world.state.directory.fleet.models)
    asking = asyncio.create_task(request(world))
    await world.until(lambda: world.state.held)
    asking.cancel()
    await world.until(lambda: not world.state.held)
    assert world.state.bookings.total(State.PENDING) == 0
