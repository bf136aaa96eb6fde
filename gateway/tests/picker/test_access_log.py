"""Envoy's access log as a raw client sends it: it ends bookings, on both front ends, and a stream that is lost harms nothing."""

from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import pytest

from penstock.api import headers
from penstock.api.load_report import LoadReport
from penstock.gateway._pb.envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from penstock.gateway._pb.envoy.service.accesslog.v3.als_pb2_grpc import AccessLogServiceStub
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse
from penstock.gateway.extproc import access_log
from penstock.gateway.extproc.access_log import AccessLogService
from penstock.gateway.extproc.call import Routed
from penstock.gateway.extproc.underway import RESPONSE_S, Underway
from penstock.gateway.flow.capacity import SILENT_ROOM, Standing, room_at
from penstock.gateway.load.reports import ReportStore
from penstock.gateway.picker.bookings import EXPIRY_S, Bookings, State
from penstock.gateway.picker.candidates import Booked, ReplicaKey


@pytest.fixture(params=["lean", "grpc"])
def ext_proc(request: pytest.FixtureRequest) -> str:
    return request.param


def message(*names: str) -> StreamAccessLogsMessage:
    """What Envoy sends of requests of these names, and of one that nobody has named."""
    told = StreamAccessLogsMessage()
    told.http_logs.log_entry.add()
    for name in names:
        told.http_logs.log_entry.add().common_properties.metadata.filter_metadata[headers.LOG_NAMESPACE].update(
            {headers.BOOKING: name, "model": "ns/tiny"}
        )
    return told


def name_in(answer: ProcessingResponse) -> str:
    return answer.dynamic_metadata.fields[headers.LOG_NAMESPACE].struct_value.fields[headers.BOOKING].string_value


async def streaming(world: Any) -> str:
    """A request whose response streams on after its exchange with the picker is over; returns its name."""
    stream = world.stream()
    name = name_in(await stream.ask(world.completion(stream=True)))
    await stream.respond(**{"content-type": "text/event-stream"})
    await stream.end()
    return name


async def test_what_envoy_has_done_with_is_no_longer_booked(world: Any) -> None:
    await world.ready()
    names = [await streaming(world) for _ in range(3)]
    assert len(set(names)) == 3
    released = world.state.bookings.released
    call = AccessLogServiceStub(world.channel).StreamAccessLogs()
    await call.write(message(names[0], names[1]))
    await world.until(lambda: released["access_log"] == 2)
    call.cancel()  # lost
    again = AccessLogServiceStub(world.channel).StreamAccessLogs()
    await again.write(message(names[0], "nonesuch", names[2]))  # the first once more
    await world.until(lambda: released["access_log"] == 3)
    assert released == {"access_log": 3}
    await again.done_writing()
    await again


async def test_a_stream_for_another_gateway_is_ended_in_time(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.ready()
    call = AccessLogServiceStub(world.channel).StreamAccessLogs()
    await call.write(message("other-1"))
    await call.write(message(await streaming(world)))
    await world.until(lambda: world.state.bookings.released["access_log"] == 1)
    assert not call.done(), "not at once: after a failover such ends keep coming"
    monkeypatch.setattr(access_log, "MISDIRECTED_S", 0.0)
    await call.write(message("other-2"))
    await call
    assert await call.code() is grpc.StatusCode.OK


async def test_one_that_leaves_sends_the_ends_of_others_picks_away_at_once() -> None:
    over: list[object] = []
    bookings = Bookings()
    underway = Underway(bookings, ReportStore())
    service = AccessLogService(underway, lambda its, _: over.append(its))
    name = underway.name()
    underway.add(name, routed(bookings, name))
    service.leave()
    left = [message("other-1"), message(name)]

    async def told() -> AsyncIterator[StreamAccessLogsMessage]:
        while left:
            yield left.pop()

    await service.StreamAccessLogs(told(), cast("Any", None))
    assert len(over) == 1 and not left, "its own are taken in, and so is what made it end the stream"
    left = [message(name), message("other-2")]
    await service.StreamAccessLogs(told(), cast("Any", None))
    assert len(left) == 1


KEY = ReplicaKey("a", 8000)


def routed(bookings: Bookings, name: str) -> Routed:
    booking = bookings.book("r", KEY, 10, 0.0)
    return Routed(endpoints=["a:8000"], pool="p", booking=booking, model="m", name="m", came=0.0, named=name)


def test_what_is_released_is_remembered_for_one_more_sweep() -> None:
    bookings = Bookings()
    underway = Underway(bookings, ReportStore())
    names = [underway.name() for _ in range(2)]
    for name in names:
        underway.add(name, routed(bookings, name))
    first = underway.get(names[0])
    assert first is not None
    bookings.release(first.booking, "finished")
    underway.sweep(1.0)
    assert underway.get(names[0]) is first, "its response may be on its way"
    underway.sweep(2.0)
    assert (underway.get(names[0]), len(underway)) == (None, 1)
    assert underway.ended(names[0]) is None
    assert underway.ended(names[1]) is not None
    assert len(underway) == 0 and not Underway(bookings, ReportStore()).ours(names[0])


def test_a_request_that_nobody_watches_does_not_count_for_ever() -> None:
    bookings, reports = Bookings(), ReportStore()
    underway = Underway(bookings, reports)
    watched, unwatched, answered = (underway.name() for _ in range(3))
    for name in (watched, unwatched, answered):
        underway.add(name, routed(bookings, name))
    for name in (unwatched, answered):
        its = underway.get(name)
        assert its is not None
        underway.passed_on(its)
    seen = underway.get(answered)
    assert seen is not None
    bookings.responded(seen.booking, None, 1.0)
    reports.observe(KEY, LoadReport(epoch=1, seq=1), RESPONSE_S - 1)
    underway.sweep(RESPONSE_S - 1)
    underway.sweep(RESPONSE_S)
    assert not bookings.released, "nothing was heard of the replica since then"
    reports.observe(KEY, LoadReport(epoch=1, seq=2, num_requests_running=1), RESPONSE_S + 1)
    underway.sweep(RESPONSE_S + 2)
    assert not bookings.released, "an answer that is not streamed may take this long"
    reports.observe(KEY, LoadReport(epoch=1, seq=3), RESPONSE_S + 3)
    underway.sweep(RESPONSE_S + 4)
    underway.sweep(RESPONSE_S + 5)
    assert bookings.released == {"expired": 1}
    assert bookings.count(KEY) == 2
    bookings.expire(EXPIRY_S)
    assert bookings.released == {"expired": 3}


def test_what_was_lost_at_a_replica_that_is_never_idle_adds_nothing_to_its_reports_after_a_while() -> None:
    """An engine of others tells no ends, and an Envoy that died took along those of its requests."""
    bookings, reports = Bookings(), ReportStore()
    underway = Underway(bookings, reports)
    lost, answered = underway.name(), underway.name()
    for name in (lost, answered):
        its = routed(bookings, name)
        underway.add(name, its)
        underway.passed_on(its)
    reports.observe(KEY, LoadReport(epoch=1, seq=1, num_requests_running=9), RESPONSE_S - 1)
    underway.sweep(RESPONSE_S)
    assert bookings.outstanding(KEY) == Booked(2, 20), "no report has come since they grew old"
    reports.observe(KEY, LoadReport(epoch=1, seq=2, num_requests_running=9), RESPONSE_S + 1)
    underway.sweep(RESPONSE_S + 2)
    assert bookings.outstanding(KEY) == Booked(), "what the replica has of them, it reports"
    assert bookings.count(KEY) == 2
    late = underway.responded(answered)
    assert late is not None and late.booking.unanswered, "an answer that is not streamed may still come"
    its = underway.ended(lost)
    assert its is not None and its.booking.unanswered
    assert underway.counted(lost), "its end is counted in place of a response"
    reports.observe(KEY, LoadReport(epoch=1, seq=3), RESPONSE_S + 3)
    bookings.expire(EXPIRY_S)
    assert bookings.count(KEY) == 0


@pytest.mark.parametrize("heard_at", [None, 1.0, RESPONSE_S])
def test_what_was_lost_at_a_replica_that_does_not_report_does_not_fill_it_for_longer(heard_at: float | None) -> None:
    bookings, reports = Bookings(), ReportStore()
    underway = Underway(bookings, reports)
    for _ in range(SILENT_ROOM):
        name = underway.name()
        its = routed(bookings, name)
        underway.add(name, its)
        underway.passed_on(its)
    if heard_at is not None:
        reports.observe(KEY, LoadReport(epoch=1, seq=1, num_requests_running=SILENT_ROOM), heard_at)

    def room() -> int:
        unanswered = bookings.count(KEY, State.PENDING)
        return room_at(Standing(report=None, report_age_s=0, booked=Booked(), unanswered=unanswered, known_s=RESPONSE_S))

    silent_since = RESPONSE_S + (heard_at or 0)
    underway.sweep(silent_since - 1)
    assert room() == 0
    underway.sweep(silent_since)
    assert room() == SILENT_ROOM


@pytest.mark.parametrize(
    "load", [{"num_requests_running": 1}, {"num_requests_waiting": {"capacity": 1}}, {"kv_cache_usage_perc": 0.1}]
)
def test_a_replica_with_anything_to_do_is_not_idle(load: dict[str, Any]) -> None:
    reports = ReportStore()
    assert not reports.idle(KEY, 0.0)
    reports.observe(KEY, LoadReport(epoch=1, seq=1, **load), 1.0)
    assert not reports.idle(KEY, 0.0)
    reports.observe(KEY, LoadReport(epoch=1, seq=2), 2.0)
    assert (reports.idle(KEY, 1.9), reports.idle(KEY, 2.0)) == (True, False)


def test_what_was_counted_at_its_end_is_known_by_name_once() -> None:
    bookings = Bookings()
    underway = Underway(bookings, ReportStore())
    early, seen, finished = names = [underway.name() for _ in range(3)]
    for name in names:
        its = routed(bookings, name)
        underway.add(name, its)
        underway.passed_on(its)
        if name == finished:
            bookings.release(its.booking, "finished")
    underway.responded(seen)
    for name in names:
        underway.ended(name)
    assert [underway.counted(name) for name in (early, early, seen, finished, "nonesuch")] == [True, *[False] * 4]
