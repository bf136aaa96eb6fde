"""Builds ext_proc's answers. Nothing here decides anything."""

from collections.abc import Iterable, Iterator

import orjson

from penstock.api import headers
from penstock.api.errors import error_body
from penstock.gateway._pb.envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    ImmediateResponse,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)
from penstock.gateway._pb.envoy.type.v3.http_status_pb2 import HttpStatus
from penstock.gateway.extproc.call import Answered, Refused, Routed

CHUNK_BYTES = 62_000
"""Envoy takes at most 64 KiB a message."""
_KINDS = {400: "invalid_request_error", 404: "invalid_request_error", 405: "invalid_request_error"}
_KINDS |= {413: "invalid_request_error", 415: "invalid_request_error", 429: "rate_limit_error"}


def set_header(name: str, value: str) -> HeaderValueOption:
    """Overwrites a header. The action is stated, since the enum's zero value means append."""
    return HeaderValueOption(
        header=HeaderValue(key=name, raw_value=value.encode()),
        append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def mutation(sets: Iterable[tuple[str, str]], remove: Iterable[str] = ()) -> HeaderMutation:
    """Sets and removes headers; what is set is not also removed, whatever the order a proxy applies them in."""
    options = [set_header(name, value) for name, value in sets]
    kept = {option.header.key for option in options}
    return HeaderMutation(set_headers=options, remove_headers=[name for name in remove if name not in kept])


def pick(routed: Routed) -> CommonResponse:
    """Sends the request on its way: destination and pool set, the client's control headers gone."""
    sets = [
        (headers.DESTINATION, ",".join(routed.endpoints)),
        (headers.POOL, routed.pool),
        (headers.LOAD_FORMAT, "TEXT"),
    ]
    if routed.request_id is not None:
        sets.append((headers.REQUEST_ID, routed.request_id))
    return CommonResponse(header_mutation=mutation(sets, headers.CONTROL_HEADERS), clear_route_cache=True)


def with_destination(answer: ProcessingResponse, routed: Routed) -> ProcessingResponse:
    """The same destination as metadata, for gateways that read it there."""
    answer.dynamic_metadata.update({headers.METADATA_NAMESPACE: {headers.DESTINATION: ",".join(routed.endpoints)}})
    return answer


def request_headers(common: CommonResponse | None = None) -> ProcessingResponse:
    """The answer to request headers."""
    return ProcessingResponse(request_headers=HeadersResponse(response=common))


def response_headers(sets: Iterable[tuple[str, str]] = ()) -> ProcessingResponse:
    """The answer to response headers: the load report is not the client's business."""
    common = CommonResponse(header_mutation=mutation(sets, (headers.LOAD,)))
    return ProcessingResponse(response_headers=HeadersResponse(response=common))


def request_body(common: CommonResponse | None = None) -> ProcessingResponse:
    """The one answer to a buffered body."""
    return ProcessingResponse(request_body=BodyResponse(response=common))


def streamed_request_body(body: bytes, ends: bool) -> Iterator[ProcessingResponse]:
    """The whole body again, in chunks; one empty chunk for an empty body. `ends`: no trailers follow."""
    for at in range(0, max(len(body), 1), CHUNK_BYTES):
        last = at + CHUNK_BYTES >= len(body)
        yield ProcessingResponse(request_body=_streamed(body[at : at + CHUNK_BYTES], last and ends))


def response_body(body: bytes, ends: bool, full_duplex: bool) -> ProcessingResponse:
    """A chunk of the response passes unchanged."""
    return ProcessingResponse(response_body=_streamed(body, ends) if full_duplex else BodyResponse())


def request_trailers() -> ProcessingResponse:
    """Request trailers pass unchanged."""
    return ProcessingResponse(request_trailers=TrailersResponse())


def response_trailers() -> ProcessingResponse:
    """Response trailers pass unchanged."""
    return ProcessingResponse(response_trailers=TrailersResponse())


def _streamed(body: bytes, ends: bool) -> BodyResponse:
    chunk = StreamedBodyResponse(body=body, end_of_stream=ends)
    return BodyResponse(response=CommonResponse(body_mutation=BodyMutation(streamed_response=chunk)))


def immediate(answer: Answered) -> ProcessingResponse:
    """The gateway's own answer."""
    sets = [("content-type", "application/json"), *answer.headers]
    return ProcessingResponse(
        immediate_response=ImmediateResponse(
            status=HttpStatus(code=answer.status),  # type: ignore[arg-type] - an enum of HTTP's numbers
            headers=mutation(sets),
            body=answer.body,
            details=f"penstock_{answer.reason}",
        )
    )


def refusal(refused: Refused) -> Answered:
    """A refusal as OpenAI's clients read it."""
    kind = _KINDS.get(refused.status, "server_error")
    sets = [(headers.REASON, refused.reason)]
    if refused.retry_after_s is not None:
        sets.append(("retry-after", str(refused.retry_after_s)))
    body = orjson.dumps(error_body(str(refused), kind, param=refused.param, code=refused.code))
    return Answered(status=refused.status, body=body, headers=sets, reason=refused.reason)
