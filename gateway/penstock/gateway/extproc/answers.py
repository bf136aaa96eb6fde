"""Builds ext_proc's answers. Nothing here decides anything."""

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
_KINDS = {400: "invalid_request_error", 404: "invalid_request_error", 405: "invalid_request_error"}
_KINDS |= {413: "invalid_request_error", 415: "invalid_request_error", 429: "rate_limit_error"}
_OVERWRITE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def _set(mutation: HeaderMutation, name: str, value: str) -> None:
    """Overwrites a header. The action is stated, since the enum's zero value means append."""
    option = mutation.set_headers.add(append_action=_OVERWRITE)
    option.header.key = name
    option.header.raw_value = value.encode()


def _picked() -> CommonResponse:
    """What the answers for all picks share. What is set is not also removed, whatever the order a proxy applies them in."""
    common = CommonResponse(clear_route_cache=True)
    _set(common.header_mutation, headers.LOAD_FORMAT, "TEXT")
    kept = (headers.LOAD_FORMAT, headers.DESTINATION, headers.POOL)
    common.header_mutation.remove_headers.extend(name for name in headers.CONTROL_HEADERS if name not in kept)
    return common


# Messages that are copied and completed: building one from keyword arguments, part by part, takes three times as long.
_PICKED = _picked()
_RESPONDED = HeadersResponse(response=CommonResponse(header_mutation=HeaderMutation(remove_headers=[headers.LOAD])))


def _pick(answer: ProcessingResponse, common: CommonResponse, routed: Routed) -> None:
    """Sends the request on its way: destination and pool set, the client's control headers gone."""
    common.CopyFrom(_PICKED)
    destination = ",".join(routed.endpoints)
    _set(common.header_mutation, headers.DESTINATION, destination)
    _set(common.header_mutation, headers.POOL, routed.pool)
    if routed.request_id is not None:
        _set(common.header_mutation, headers.REQUEST_ID, routed.request_id)
    # As metadata too, for gateways that read it there.
    namespace = answer.dynamic_metadata.fields[headers.METADATA_NAMESPACE].struct_value
    namespace.fields[headers.DESTINATION].string_value = destination


def request_headers(routed: Routed | None = None) -> ProcessingResponse:
    """The answer to request headers; None while it is the body that decides."""
    answer = ProcessingResponse(request_headers=HeadersResponse())
    if routed is not None:
        _pick(answer, answer.request_headers.response, routed)
    return answer


def response_headers(sets: Iterable[tuple[str, str]] = ()) -> ProcessingResponse:
    """The answer to response headers: the load report is not the client's business."""
    answer = ProcessingResponse(response_headers=_RESPONDED)
    for name, value in sets:
        _set(answer.response_headers.response.header_mutation, name, value)
    return answer


def request_body(routed: Routed) -> ProcessingResponse:
    """The one answer to a buffered body."""
    answer = ProcessingResponse()
    _pick(answer, answer.request_body.response, routed)
    return answer


def streamed_request_body(body: bytes, ends: bool) -> Iterator[ProcessingResponse]:
    """The whole body again, in chunks; one empty chunk for an empty body. `ends`: no trailers follow."""
    for at in range(0, max(len(body), 1), CHUNK_BYTES):
        last = at + CHUNK_BYTES >= len(body)
        answer = ProcessingResponse()
        _stream(answer.request_body, body[at : at + CHUNK_BYTES], last and ends)
        yield answer


def response_body(body: bytes, ends: bool, full_duplex: bool) -> ProcessingResponse:
    """A chunk of the response passes unchanged."""
    answer = ProcessingResponse(response_body=BodyResponse())
    if full_duplex:
        _stream(answer.response_body, body, ends)
    return answer


def request_trailers() -> ProcessingResponse:
    """Request trailers pass unchanged."""
    return ProcessingResponse(request_trailers=TrailersResponse())


def response_trailers() -> ProcessingResponse:
    """Response trailers pass unchanged."""
    return ProcessingResponse(response_trailers=TrailersResponse())


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
    sets = [(headers.REASON, refused.reason)]
    if refused.retry_after_s is not None:
        sets.append(("retry-after", str(refused.retry_after_s)))
    body = orjson.dumps(error_body(str(refused), kind, param=refused.param, code=refused.code))
    return Answered(status=refused.status, body=body, headers=sets, reason=refused.reason)
