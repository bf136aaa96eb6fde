"""Builds ext_proc's answers. Nothing here decides anything."""

import functools
from collections.abc import Iterable, Iterator

import orjson

from penstock.api import headers
from penstock.api.errors import error_body
from penstock.gateway._pb.envoy.config.core.v3.base_pb2 import HeaderValueOption
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    ImmediateResponse,
    ProcessingResponse,
    TrailersResponse,
)
from penstock.gateway._pb.envoy.type.v3.http_status_pb2 import HttpStatus
from penstock.gateway.extproc.call import Answered, Refused, Routed

CHUNK_BYTES = 62_000
"""Envoy takes at most 64 KiB a message."""
MAX_NAME = 256
_KINDS: dict[int, str] = dict.fromkeys((400, 404, 405, 413, 415), "invalid_request_error")
_KINDS |= {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CONTROL = frozenset(headers.CONTROL_HEADERS)
_OVERWRITE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def _set(mutation: HeaderMutation, name: str, value: str) -> None:
    """Overwrites a header. The action is stated, since the enum's zero value means append."""
    option = mutation.set_headers.add(append_action=_OVERWRITE)
    option.header.key = name
    option.header.raw_value = value.encode()


@functools.cache
def _picked(*kept: str) -> CommonResponse:
    """What the answers for picks share that set these control headers. It is to be copied and completed: building a message from
    keyword arguments, part by part, takes three times as long. What is set is not removed, too, in whatever order a proxy applies
    them.
    """
    common = CommonResponse(clear_route_cache=True)
    _set(common.header_mutation, headers.LOAD_FORMAT, "TEXT")
    stays = (headers.LOAD_FORMAT, headers.DESTINATION, headers.POOL, *kept)
    common.header_mutation.remove_headers.extend(name for name in headers.CONTROL_HEADERS if name not in stays)
    return common


_RESPONDED = HeadersResponse(response=CommonResponse(header_mutation=HeaderMutation(remove_headers=headers.LOADS)))


def _pick(answer: ProcessingResponse, common: CommonResponse, routed: Routed) -> None:
    """Sends the request on its way: destination and pool set, the client's control headers gone."""
    kept = [name for name, _ in routed.sets if name in _CONTROL]
    common.CopyFrom(_picked(*kept) if routed.prefiller is None else _picked(*kept, headers.PREFILLER))
    destination = ",".join(routed.endpoints)
    _set(common.header_mutation, headers.DESTINATION, destination)
    if routed.pool is not None:
        _set(common.header_mutation, headers.POOL, routed.pool)
    else:
        common.header_mutation.remove_headers.append(headers.POOL)
    if routed.prefiller is not None:
        _set(common.header_mutation, headers.PREFILLER, routed.prefiller)
    if routed.request_id is not None:
        _set(common.header_mutation, headers.REQUEST_ID, routed.request_id)
    for name, value in routed.sets:
        _set(common.header_mutation, name, value)
    common.header_mutation.remove_headers.extend(routed.removes)
    # As metadata too, for gateways that read it there.
    namespace = answer.dynamic_metadata.fields[headers.METADATA_NAMESPACE].struct_value
    namespace.fields[headers.DESTINATION].string_value = destination
    if routed.log:
        shown = answer.dynamic_metadata.fields[headers.LOG_NAMESPACE].struct_value.fields
        for name, value in routed.log.items():
            if isinstance(value, str):
                shown[name].string_value = value
            else:
                shown[name].number_value = value


def request_headers(routed: Routed | None = None) -> ProcessingResponse:
    """The answer to request headers; None while it is the body that decides."""
    answer = ProcessingResponse(request_headers=HeadersResponse())
    if routed is not None:
        _pick(answer, answer.request_headers.response, routed)
    return answer


def response_headers(sets: Iterable[tuple[str, str]] = ()) -> ProcessingResponse:
    """The answer to response headers: the load report is not the client's business."""
    return ProcessingResponse.FromString(_responded(tuple(sets)))


@functools.lru_cache(maxsize=4096)
def _responded(sets: tuple[tuple[str, str], ...]) -> bytes:
    """Return the answer as bytes, which are the same for all answers of one replica with one model."""
    answer = ProcessingResponse(response_headers=_RESPONDED)
    for name, value in sets:
        _set(answer.response_headers.response.header_mutation, name, value)
    return answer.SerializeToString()


def request_body(routed: Routed) -> ProcessingResponse:
    """Return the answer to a buffered body. Its content length must be right, unlike that of a streamed body."""
    answer = ProcessingResponse()
    common = answer.request_body.response
    _pick(answer, common, routed)
    if routed.body is not None:
        common.body_mutation.body = routed.body
        _set(common.header_mutation, "content-length", str(len(routed.body)))
    return answer


def streamed_request_body(body: bytes, ends: bool) -> Iterator[ProcessingResponse]:
    """The whole body again, in chunks; one empty chunk for an empty body. `ends`: no trailers follow."""
    for chunk, last in _chunks(body):
        answer = ProcessingResponse()
        _stream(answer.request_body, chunk, last and ends)
        yield answer


def request_chunks(count: int, body: bytes | None) -> Iterator[ProcessingResponse]:
    """One answer to each of `count` streamed chunks, which go on; with another `body`, that goes on in place of the first."""
    for index in range(count):
        answer = ProcessingResponse(request_body=BodyResponse())
        if body is not None:
            mutation = answer.request_body.response.body_mutation
            if index == 0:
                mutation.body = body
            else:
                mutation.clear_body = True
        yield answer


def response_body(body: bytes, ends: bool, full_duplex: bool) -> list[ProcessingResponse]:
    """A chunk of the response passes unchanged."""
    if not full_duplex:
        return [ProcessingResponse(response_body=BodyResponse())]
    passed: list[ProcessingResponse] = []
    for chunk, last in _chunks(body):
        answer = ProcessingResponse()
        _stream(answer.response_body, chunk, last and ends)
        passed.append(answer)
    return passed


def override(answer: ProcessingResponse, request_body_mode: int, response_body_mode: int) -> None:
    """Asks in the answer to headers for another response body mode; a gateway that does not allow it goes on as before."""
    answer.mode_override.request_body_mode = request_body_mode  # type: ignore[assignment] - an open enum
    answer.mode_override.response_body_mode = response_body_mode  # type: ignore[assignment]


def request_trailers() -> ProcessingResponse:
    """Request trailers pass unchanged."""
    return ProcessingResponse(request_trailers=TrailersResponse())


def response_trailers() -> ProcessingResponse:
    """Response trailers pass unchanged."""
    return ProcessingResponse(response_trailers=TrailersResponse())


def printable(name: str) -> str:
    """A name as the value of a header: that of an open pool is whatever a client has called it."""
    if len(name) <= MAX_NAME and name.isascii() and name.isprintable():
        return name
    return "".join(letter if " " <= letter <= "~" else "?" for letter in name[:MAX_NAME])


def _chunks(body: bytes) -> Iterator[tuple[bytes, bool]]:
    """`body` in pieces that Envoy takes, at least one, and whether each is the last."""
    for at in range(0, max(len(body), 1), CHUNK_BYTES):
        yield body[at : at + CHUNK_BYTES], at + CHUNK_BYTES >= len(body)


def _stream(response: BodyResponse, body: bytes, ends: bool) -> None:
    chunk = response.response.body_mutation.streamed_response
    chunk.body = body
    chunk.end_of_stream = ends


def immediate(answer: Answered) -> ProcessingResponse:
    """The gateway's own answer."""
    response = ImmediateResponse(
        status=HttpStatus(code=answer.status),  # type: ignore[arg-type] - an enum of HTTP's numbers
        body=answer.body,
        details=f"penstock_{answer.reason}",
    )
    for name, value in [("content-type", "application/json"), *answer.headers]:
        _set(response.headers, name, value)
    return ProcessingResponse(immediate_response=response)


def refusal(refused: Refused) -> Answered:
    """A refusal as OpenAI's clients read it."""
    kind = _KINDS.get(refused.status, "server_error")
    sets = [(headers.REASON, refused.reason), *refused.sets]
    if refused.retry_after_s is not None:
        sets.append(("retry-after", str(refused.retry_after_s)))
    body = orjson.dumps(error_body(str(refused), kind, param=refused.param, code=refused.code))
    return Answered(status=refused.status, body=body, headers=sets, reason=refused.reason)
