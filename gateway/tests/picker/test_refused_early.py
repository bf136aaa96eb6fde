"""Callers that go on sending a request which was refused at its headers, or is sent in a way that is not served."""

import asyncio

import grpc
import pytest
from grpc.aio import EOF, AbortError  # type: ignore[attr-defined]
from test_exchange import TRAILERS, FixedDirector, chunk, head
from wires import parsed, read

from penstock.gateway._pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from penstock.gateway.extproc import service
from penstock.gateway.extproc.ceiling import Ceiling
from penstock.gateway.extproc.service import ExtProcService
from penstock.gateway.extproc.wire import Answer


class Caller:
    """What a service sees of one: says these messages, and then nothing for ever."""

    def __init__(self, *messages: ProcessingRequest | object, ceiling: Ceiling, pause_s: float = 0.0) -> None:
        self.unread = list(messages)
        self._pause_s = pause_s
        self.answers: list[ProcessingResponse] = []
        self._ceiling = ceiling
        self.counted: list[int] = []
        """Streams under the ceiling at each reading."""

    def invocation_metadata(self) -> None:
        return None

    async def read(self) -> object:
        self.counted.append(self._ceiling.streams)
        await asyncio.sleep(self._pause_s)
        message = self.unread.pop(0) if self.unread else await asyncio.Future[object]()
        if isinstance(message, Exception):
            raise message
        return read(message) if isinstance(message, ProcessingRequest) else message

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise AbortError(code, details)

    async def write(self, message: Answer) -> None:
        self.answers += parsed([message])


async def heard_out(*messages: ProcessingRequest | object, pause_s: float = 0.0) -> Caller:
    ceiling = Ceiling()
    caller = Caller(*messages, ceiling=ceiling, pause_s=pause_s)
    async with asyncio.timeout(60):
        await ExtProcService(FixedDirector(), ceiling=ceiling).Process(None, caller)  # type: ignore[arg-type] - as far as it goes
    assert [answer.immediate_response.status.code for answer in caller.answers] == [404]
    return caller


@pytest.mark.parametrize("last", [chunk(b"}", ends=True), TRAILERS, EOF], ids=["body", "trailers", "close"])
async def test_the_rest_of_a_refused_request_is_read_to_its_end_and_takes_no_place(last: ProcessingRequest | object) -> None:
    caller = await heard_out(head(path="/nowhere"), chunk(b"{"), last, chunk(b"more"))
    assert caller.unread == [chunk(b"more")]
    assert caller.counted == [0, 0, 0]


async def test_a_refused_request_that_is_complete_ends_at_once() -> None:
    caller = await heard_out(head(path="/nowhere", ends=True), chunk(b"more"))
    assert caller.unread == [chunk(b"more")]


async def test_who_is_slow_is_heard_out() -> None:
    assert not (await heard_out(head(path="/nowhere"), chunk(b"{"), chunk(b"}", ends=True), pause_s=0.5)).unread


async def test_nobody_is_heard_out_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "HEARD_OUT_S", 0.01)
    assert not (await heard_out(head(path="/nowhere"), chunk(b"{"))).unread


async def test_who_sends_on_in_a_mode_that_is_not_served_is_heard_before_the_error() -> None:
    """grpc.aio's client loses the error where the stream ends while it writes; who sends nothing more is not kept waiting."""
    for rest, left in (([chunk(b"{", ends=True), chunk(b"more")], [chunk(b"more")]), ([], [])):
        ceiling = Ceiling()
        caller = Caller(head(ProcessingMode.NONE), *rest, ceiling=ceiling)
        with pytest.raises(AbortError, match="request_body_mode NONE"):
            await ExtProcService(FixedDirector(), ceiling=ceiling).Process(None, caller)  # type: ignore[arg-type] - as far as it goes
        assert (caller.unread, caller.answers, ceiling.streams) == (left, [], 0)


async def test_what_cannot_be_read_after_a_refusal_is_not_answered_again() -> None:
    ceiling = Ceiling()
    caller = Caller(head(path="/nowhere"), ValueError("no message"), ceiling=ceiling)
    with pytest.raises(ValueError, match="no message"):
        await ExtProcService(FixedDirector(), ceiling=ceiling).Process(None, caller)  # type: ignore[arg-type] - as far as it goes
    assert [answer.immediate_response.status.code for answer in caller.answers] == [404]
    assert not ceiling.streams
