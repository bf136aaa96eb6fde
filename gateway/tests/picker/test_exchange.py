"""The ext_proc state machine in each body mode, without a transport."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import orjson
import pytest
from wires import BothWires, parsed, read

from penstock.api import headers
from penstock.gateway._pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from penstock.gateway.extproc.answers import CHUNK_BYTES
from penstock.gateway.extproc.body import MAX_BODY_BYTES
from penstock.gateway.extproc.call import Answered, Call, Refused, ResponseHead, Routed
from penstock.gateway.extproc.exchange import Exchange, UnsupportedMode
from penstock.gateway.picker.bookings import Bookings
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.compiled import UsualHeads

DUPLEX, BUFFERED = ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.BUFFERED
ENDPOINTS = "10.0.0.1:8000,10.0.0.2:8000"


class FixedDirector:
    """Sends everything to the same place, or refuses it."""

    usual_heads: UsualHeads | None = None
    at_once: Callable[[dict[str, str], bytes], Routed | None] | None = None

    def __init__(self, refusal: Refused | None = None, body: bytes | None = None) -> None:
        self.calls: list[Call] = []
        self.heads: list[ResponseHead] = []
        self.ended = 0
        self._refusal = refusal
        self._body = body

    def preview(self, call: Call) -> None:
        if call.path == "/nowhere":
            raise Refused(404, "no such path", "unknown_path")

    async def route(self, call: Call) -> Routed | Answered:
        self.calls.append(call)
        if self._refusal is not None:
            raise self._refusal
        if call.path == "/v1/models":
            return Answered(status=200, body=b"{}")
        booking = Bookings().book("r", ReplicaKey("u", 8000), 1, 0.0)
        return Routed(
            endpoints=ENDPOINTS.split(","), pool="ns/m/p", booking=booking, body=self._body, model="ns/m", name="m", came=0.0
        )

    def responded(self, routed: Routed, head: ResponseHead) -> list[tuple[str, str]]:
        self.heads.append(head)
        return [(headers.REPLICA, "u")]

    def returned(self, noted: Mapping[str, str], head: ResponseHead) -> list[tuple[str, str]]:
        self.noted = noted
        self.heads.append(head)
        return [(headers.REPLICA, "other")]

    def passed_on(self, routed: Routed) -> None:
        self.gone_on = routed

    def ended(self, routed: Routed) -> None:
        self.ended_with = routed

    def closed(self, routed: Routed) -> None:
        self.ended += 1

    def refused(self, call: Call, refused: Refused) -> None:
        self.told = call.path, refused.status


def head(
    mode: int | None = DUPLEX, *, ends: bool = False, path: str = "/v1/completions", method: str = "POST"
) -> ProcessingRequest:
    message = ProcessingRequest(request_headers=HttpHeaders(end_of_stream=ends))
    for name, value in ((":method", method), (":path", path), (headers.POOL, "forged")):
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    if mode is not None:
        message.protocol_config.CopyFrom(ProtocolConfiguration(request_body_mode=mode))
    return message


def chunk(body: bytes, ends: bool = False) -> ProcessingRequest:
    return ProcessingRequest(request_body=HttpBody(body=body, end_of_stream=ends))


TRAILERS = ProcessingRequest(request_trailers=HttpTrailers())


def play(director: FixedDirector, *messages: ProcessingRequest, destinations: int = 4) -> list[list[ProcessingResponse]]:
    async def run() -> list[list[ProcessingResponse]]:
        exchange = Exchange(director, destinations, wire=BothWires())
        return [parsed(await exchange.receive(read(message))) for message in messages]

    return asyncio.run(run())


@pytest.mark.parametrize("mode", [DUPLEX, ProcessingMode.BUFFERED])
async def test_neither_a_body_nor_its_choice_is_kept_while_the_answer_streams(mode: int) -> None:
    exchange = Exchange(FixedDirector())
    for message in (head(mode), chunk(b'{"model":"m"}', True)):
        assert await exchange.receive(read(message)) or message.HasField("request_headers")
    assert not exchange._body
    routed = exchange._routed
    assert routed is not None
    routed.choice = cast(Any, "figures of all replicas")
    exchange.told()
    assert exchange._routed is routed and routed.choice is None


def check_pick(answer: ProcessingResponse, part: str) -> None:
    """The destination twice, the pool, the route cache, no control header of the client's."""
    common = getattr(answer, part).response
    sets = {o.header.key: o.header.raw_value.decode() for o in common.header_mutation.set_headers}
    assert sets == {headers.DESTINATION: ENDPOINTS, headers.POOL: "ns/m/p", headers.LOAD_FORMAT: "TEXT"}
    assert len(common.header_mutation.set_headers) == len(sets)
    assert all(not o.header.value and o.append_action == 2 for o in common.header_mutation.set_headers)
    assert set(common.header_mutation.remove_headers) | set(sets) >= set(headers.CONTROL_HEADERS)
    assert not set(common.header_mutation.remove_headers) & set(sets)
    assert common.clear_route_cache
    namespace = answer.dynamic_metadata.fields[headers.METADATA_NAMESPACE].struct_value
    assert namespace.fields[headers.DESTINATION].string_value == ENDPOINTS


def streamed(answers: list[ProcessingResponse]) -> tuple[bytes, list[bool]]:
    chunks = [answer.request_body.response.body_mutation.streamed_response for answer in answers]
    assert all(len(c.body) <= CHUNK_BYTES for c in chunks)
    return b"".join(c.body for c in chunks), [c.end_of_stream for c in chunks]


@pytest.mark.req("RT-41")
@pytest.mark.parametrize("mode", [DUPLEX, None])
@pytest.mark.parametrize("size", [1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES - 7])
def test_full_duplex_holds_the_headers_and_sends_the_whole_body_again(mode: int | None, size: int) -> None:
    body = bytes(n % 251 for n in range(size))
    director = FixedDirector()
    first, second, third, late = play(
        director, head(mode), chunk(body[:100]), chunk(body[100:], ends=True), chunk(b"x", ends=True)
    )
    assert first == second == late == []  # the last is a duplicate end of stream
    check_pick(third[0], "request_headers")
    sent, ends = streamed(third[1:])
    assert sent == body
    assert ends == [False] * (len(ends) - 1) + [True]
    assert director.calls[0].body == body
    assert len(director.calls) == 1


@pytest.mark.req("RT-41")
def test_trailers_end_the_body_of_a_full_duplex_request() -> None:
    _, _, answers = play(FixedDirector(), head(), chunk(b"{}"), TRAILERS)
    check_pick(answers[0], "request_headers")
    assert streamed(answers[1:-1]) == (b"{}", [False])
    assert answers[-1].WhichOneof("response") == "request_trailers"


def test_an_empty_body_is_one_empty_chunk() -> None:
    _, answers = play(FixedDirector(), head(), chunk(b"", ends=True))
    assert streamed(answers[1:]) == (b"", [True])
    _, answers = play(FixedDirector(), head(), TRAILERS)
    assert answers[1].request_body.response.body_mutation.WhichOneof("mutation") == "streamed_response"
    assert streamed(answers[1:-1]) == (b"", [False])


@pytest.mark.req("RT-41")
def test_buffered_answers_headers_at_once_and_picks_in_the_body_answer() -> None:
    first, second, third = play(FixedDirector(), head(BUFFERED), chunk(b"{}", ends=True), chunk(b"{}", ends=True))
    assert [answer.WhichOneof("response") for answer in first] == ["request_headers"]
    assert not first[0].request_headers.response.header_mutation.set_headers
    check_pick(second[0], "request_body")
    assert not second[0].request_body.response.HasField("body_mutation")
    assert (len(second), third) == (1, [])


@pytest.mark.req("RT-41")
def test_a_request_without_a_body_is_decided_at_its_headers() -> None:
    director = FixedDirector()
    ((answer,),) = play(director, head(ends=True))
    check_pick(answer, "request_headers")
    ((models,),) = play(director, head(ProcessingMode.NONE, ends=True, path="/v1/models", method="GET"))
    assert models.immediate_response.status.code == 200


@pytest.mark.parametrize("mode", ["NONE", "STREAMED", "BUFFERED_PARTIAL", "99"])
def test_modes_that_no_picker_can_serve_are_refused_by_name(mode: str) -> None:
    number = 99 if mode == "99" else ProcessingMode.BodySendMode.Value(mode)
    with pytest.raises(UnsupportedMode, match=f"request_body_mode {mode}"):
        play(FixedDirector(), head(number))


def ahead() -> ProcessingRequest:
    message = head(ProcessingMode.STREAMED)
    message.protocol_config.send_body_without_waiting_for_header_response = True
    return message


@pytest.mark.req("RT-41")
@pytest.mark.parametrize("last", [chunk(b"}", ends=True), TRAILERS])
def test_a_gateway_that_streams_ahead_of_the_headers_waits_for_the_pick(last: ProcessingRequest) -> None:
    director = FixedDirector()
    *early, (first, *chunks) = play(director, ahead(), chunk(b"{"), chunk(b""), last)
    assert early == [[], [], []]
    check_pick(first, "request_headers")
    kinds = [answer.WhichOneof("response") for answer in chunks]
    trailers = last is TRAILERS
    assert kinds == ["request_body"] * (2 if trailers else 3) + ["request_trailers"] * trailers, "one answer a message"
    assert not any(answer.request_body.response.HasField("body_mutation") for answer in chunks)
    assert director.calls[0].body == (b"{" if trailers else b"{}")


def test_a_replaced_body_goes_on_in_place_of_streamed_chunks() -> None:
    *_, (_, *chunks) = play(FixedDirector(body=b"other"), ahead(), chunk(b"{"), chunk(b"}", ends=True))
    first, second = [answer.request_body.response.body_mutation for answer in chunks]
    assert (first.body, second.clear_body) == (b"other", True)


@pytest.mark.parametrize("messages", [(chunk(b"{}", ends=True),), (TRAILERS,)])
def test_a_gateway_that_skips_request_headers_is_told_so(messages: tuple[ProcessingRequest, ...]) -> None:
    with pytest.raises(UnsupportedMode, match="request_header_mode SKIP"):
        play(FixedDirector(), *messages)


def test_request_headers_come_once() -> None:
    with pytest.raises(UnsupportedMode, match="twice"):
        play(FixedDirector(), head(), head())


def test_a_buffered_body_with_trailers_is_complete_before_them() -> None:
    director = FixedDirector()
    _, (answer,), (trailers,) = play(director, head(BUFFERED), chunk(b"{}"), TRAILERS)
    check_pick(answer, "request_body")
    assert trailers.WhichOneof("response") == "request_trailers"
    assert [call.body for call in director.calls] == [b"{}"]


def test_trailers_alone_after_buffered_headers_never_go_on_without_a_destination() -> None:
    director = FixedDirector()
    _, (answer,), rest = play(director, head(BUFFERED), TRAILERS, TRAILERS)
    assert answer.immediate_response.status.code == 400
    assert [message.WhichOneof("response") for message in rest] == ["request_trailers"]
    _, (models,) = play(director, head(BUFFERED, path="/v1/models", method="GET"), TRAILERS)
    assert models.immediate_response.status.code == 200


def test_a_replaced_body_goes_on_with_its_own_length() -> None:
    sent = bytes(n % 251 for n in range(CHUNK_BYTES + 7))
    director = FixedDirector(body=sent)
    _, answers = play(director, head(), chunk(b"{}", ends=True))
    assert streamed(answers[1:]) == (sent, [False, True])
    _, (answer,) = play(director, head(BUFFERED), chunk(b"{}", ends=True))
    common = answer.request_body.response
    assert common.body_mutation.body == sent
    lengths = [o.header.raw_value for o in common.header_mutation.set_headers if o.header.key == "content-length"]
    assert lengths == [str(len(sent)).encode()]


def test_a_gateway_that_takes_one_address_gets_one() -> None:
    _, answers = play(FixedDirector(), head(), chunk(b"{}", ends=True), destinations=1)
    namespace = answers[0].dynamic_metadata.fields[headers.METADATA_NAMESPACE].struct_value
    assert namespace.fields[headers.DESTINATION].string_value == ENDPOINTS.split(",")[0]


def test_header_names_are_read_in_any_case() -> None:
    message = head()
    message.request_headers.headers.headers.add(key="X-Request-ID", value="mine")
    director = FixedDirector()
    play(director, message, chunk(b"{}", ends=True))
    assert director.calls[0].headers[headers.REQUEST_ID] == "mine"


@pytest.mark.req("RT-41")
def test_refusals_are_openais_json_with_their_headers() -> None:
    refusal = Refused(503, "nobody is ready", "no_ready_replica", retry_after_s=5)
    _, (answer,) = play(FixedDirector(refusal), head(), chunk(b"{}", ends=True))
    immediate = answer.immediate_response
    assert immediate.status.code == 503
    sets = {o.header.key: o.header.raw_value for o in immediate.headers.set_headers}
    assert sets == {"content-type": b"application/json", "retry-after": b"5", headers.REASON: b"no_ready_replica"}
    error = {"message": "nobody is ready", "type": "server_error", "param": None, "code": "no_ready_replica"}
    assert orjson.loads(immediate.body) == {"error": error}


def test_what_no_body_could_save_is_refused_at_the_headers_and_then_ignored() -> None:
    director = FixedDirector()
    (answer,), rest, end = play(director, head(path="/nowhere"), chunk(b"{"), chunk(b"}", ends=True))
    assert answer.immediate_response.status.code == 404
    assert rest == end == []
    assert director.calls == []


def test_a_body_beyond_the_limit_is_413_before_its_end() -> None:
    director = FixedDirector()
    half = bytes(MAX_BODY_BYTES // 2)
    *_, (answer,), after = play(director, head(), chunk(half), chunk(half), chunk(b"1"), chunk(b"", ends=True))
    assert answer.immediate_response.status.code == 413
    assert after == []
    assert director.calls == []


@pytest.mark.req("RT-41")
@pytest.mark.parametrize("carrier", ["headers", "body"])
def test_a_subset_hint_counts_whichever_message_carries_it(carrier: str) -> None:
    director = FixedDirector()
    messages = {"headers": head(), "body": chunk(b"{}", ends=True)}
    hint = messages[carrier].metadata_context.filter_metadata[headers.SUBSET_NAMESPACE]
    hint.update({headers.SUBSET: ["10.0.0.1:8000", 7]})
    play(director, *messages.values())
    subset = director.calls[0].subset
    assert subset is not None
    assert subset.endpoints == {("10.0.0.1", 8000)}
    play(director, head(), chunk(b"{}", ends=True))
    assert director.calls[1].subset is None


@pytest.mark.req("RT-41")
def test_an_unreadable_subset_hint_allows_nothing() -> None:
    director = FixedDirector()
    message = head()
    message.metadata_context.filter_metadata[headers.SUBSET_NAMESPACE].update({headers.SUBSET: {"a": "10.0.0.1"}})
    play(director, message, chunk(b"{}", ends=True))
    subset = director.calls[0].subset
    assert subset is not None
    assert not subset.hosts | subset.endpoints


@pytest.mark.req("RT-41")
def test_response_headers_lose_the_load_report_and_gain_the_replica() -> None:
    director = FixedDirector()
    response = ProcessingRequest(response_headers=HttpHeaders())
    response.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    response.response_headers.headers.headers.add(key=headers.LOAD, raw_value=b"TEXT a=1")
    by_attribute = ProcessingRequest.FromString(response.SerializeToString())
    by_attribute.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": "10.0.0.2:8000"})
    response.metadata_context.filter_metadata[headers.METADATA_NAMESPACE].update({headers.DESTINATION_SERVED: "10.0.0.1:8000"})
    *_, (first,), (second,) = play(director, head(), chunk(b"{}", ends=True), response, by_attribute)
    common = first.response_headers.response
    assert list(common.header_mutation.remove_headers) == list(headers.LOADS)
    assert common.header_mutation.set_headers[0].header.key == headers.REPLICA
    assert director.heads[0].headers[headers.LOAD] == "TEXT a=1"
    assert [h.served for h in director.heads] == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert second.WhichOneof("response") == "response_headers"


@pytest.mark.parametrize("said", [["10.0.0.1:8000"], "10.0.0.1:8000", [], ["10.0.0.1:8000", "10.0.0.3:8000"], 7, ""])
def test_who_answered_is_read_where_the_gateway_names_one(said: object) -> None:
    """Envoy's attribute says it where the metadata says nothing, or names several, of which nobody knows which it was."""
    director = FixedDirector()
    response = ProcessingRequest(response_headers=HttpHeaders())
    response.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": "10.0.0.2:8000"})
    response.metadata_context.filter_metadata[headers.METADATA_NAMESPACE].update({headers.DESTINATION_SERVED: said})
    play(director, head(), chunk(b"{}", ends=True), response)
    assert director.heads[0].served == ("10.0.0.1:8000" if said in ("10.0.0.1:8000", ["10.0.0.1:8000"]) else "10.0.0.2:8000")


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("text/event-stream; charset=utf-8", "STREAMED"),
        ("Text/Event-Stream", "STREAMED"),
        ("text/event-streams", "NONE"),
        ("application/json", "NONE"),
    ],
)
@pytest.mark.parametrize("configured", ["BUFFERED", "BUFFERED_PARTIAL"])
def test_a_gateway_that_buffers_responses_is_asked_not_to(kind: str, mode: str, configured: str) -> None:
    first = head()
    first.protocol_config.response_body_mode = ProcessingMode.BodySendMode.Value(configured)  # type: ignore[assignment]
    response = ProcessingRequest(response_headers=HttpHeaders())
    response.response_headers.headers.headers.add(key="content-type", raw_value=kind.encode())
    *_, (answer,) = play(FixedDirector(), first, chunk(b"{}", ends=True), response)
    assert ProcessingMode.BodySendMode.Name(answer.mode_override.response_body_mode) == mode
    assert answer.mode_override.request_body_mode == DUPLEX
    *_, (plain,) = play(FixedDirector(), head(), chunk(b"{}", ends=True), response)
    assert not plain.HasField("mode_override")


@pytest.mark.parametrize("ends", [True, False])
def test_a_response_chunk_that_is_too_large_for_one_message_comes_back_in_several(ends: bool) -> None:
    event = ProcessingRequest(response_body=HttpBody(body=bytes(3 * CHUNK_BYTES), end_of_stream=ends))
    *_, answers = play(FixedDirector(), head(None), chunk(b"{}", ends=True), event)
    chunks = [answer.response_body.response.body_mutation.streamed_response for answer in answers]
    assert [(len(c.body), c.end_of_stream) for c in chunks] == [(CHUNK_BYTES, False)] * 2 + [(CHUNK_BYTES, ends)]


def test_response_bodies_pass_where_a_gateway_sends_them() -> None:
    duplex = head()
    duplex.protocol_config.response_body_mode = DUPLEX
    event = ProcessingRequest(response_body=HttpBody(body=b"data: 1", end_of_stream=True))
    trailers = ProcessingRequest(response_trailers=HttpTrailers())
    *_, (echo,), (end,) = play(FixedDirector(), duplex, chunk(b"{}", ends=True), event, trailers)
    assert echo.response_body.response.body_mutation.streamed_response.body == b"data: 1"
    assert echo.response_body.response.body_mutation.streamed_response.end_of_stream
    assert end.WhichOneof("response") == "response_trailers"
    *_, (plain,) = play(FixedDirector(), head(), chunk(b"{}", ends=True), event)
    assert plain.WhichOneof("response") == "response_body"
    assert not plain.response_body.HasField("response")


@pytest.mark.parametrize("mode", [DUPLEX, ProcessingMode.STREAMED])
def test_the_end_of_a_response_that_comes_twice_is_answered_once(mode: int) -> None:
    first = head()
    first.protocol_config.response_body_mode = mode  # type: ignore[assignment]
    last = ProcessingRequest(response_body=HttpBody(body=b"data: 1", end_of_stream=True))
    *_, once, again = play(FixedDirector(), first, chunk(b"{}", ends=True), last, last)
    assert (len(once), again) == (1, [])


def test_observers_get_no_answer() -> None:
    message = head(ends=True)
    message.observability_mode = True
    assert play(FixedDirector(), message) == [[]]
