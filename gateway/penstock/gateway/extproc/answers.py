"""Builds ext_proc's answers. Nothing here decides anything."""

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import orjson

from penstock.api import headers
from penstock.api.errors import error_body
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
from penstock.gateway.extproc.call import LOGGED, Answered, Refused, Routed
from penstock.gateway.extproc.wire import Fields, Pick, Wire, overwrite, send_on

CHUNK_BYTES = 62_000
"""Envoy takes at most 64 KiB a message."""
_KINDS: dict[int, str] = dict.fromkeys((400, 404, 405, 413, 415), "invalid_request_error")
_KINDS |= {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CONTROL = frozenset(headers.CONTROL_HEADERS)


@functools.cache
def _control(*kept: str) -> bytes:
    """The `HeaderMutation` that picks share which set these control headers. What is set is not removed, too, in whatever order a
    proxy applies them."""
    mutation = HeaderMutation()
    overwrite(mutation, headers.LOAD_FORMAT, "TEXT")
    stays = (headers.LOAD_FORMAT, headers.DESTINATION, headers.POOL, *kept)
    mutation.remove_headers.extend(name for name in headers.CONTROL_HEADERS if name not in stays)
    return mutation.SerializeToString()


class Usual(NamedTuple):
    """What `pick` says alike of all requests that are `Routed.usual`."""

    mutation: bytes
    destination: str
    """The header with the endpoints, and the field of `metadata` that has them, too."""
    pool: str
    """The header with the pool."""
    metadata: str
    log: str
    """The namespace of the notes."""
    notes: tuple[str, ...]
    """Their names."""


USUAL = Usual(_control(), headers.DESTINATION, headers.POOL, headers.METADATA_NAMESPACE, headers.LOG_NAMESPACE, LOGGED)
_RESPONDED = HeadersResponse(response=CommonResponse(header_mutation=HeaderMutation(remove_headers=headers.LOADS)))


def pick(routed: Routed) -> Pick:
    """Sends the request on its way: destination and pool set, the client's control headers gone."""
    destination = ",".join(routed.endpoints)
    sets, removes = [(headers.DESTINATION, destination)], list(routed.removes)
    kept = [name for name, _ in routed.sets if name in _CONTROL] if routed.sets else []
    if routed.pool is not None:
        sets.append((headers.POOL, routed.pool))
    else:
        removes.append(headers.POOL)
    if routed.choice is not None and (hop := routed.choice.hop) is not None:
        sets.append((headers.PREFILLER, hop.replica.endpoint))
        kept.append(headers.PREFILLER)
    if routed.request_id is not None:
        sets.append((headers.REQUEST_ID, routed.request_id))
    # As metadata too, for gateways that read it there.
    metadata: list[tuple[str, Fields]] = [(headers.METADATA_NAMESPACE, {headers.DESTINATION: destination})]
    if log := routed.log:
        metadata.append((headers.LOG_NAMESPACE, log))
    return Pick(_control(*kept), sets + routed.sets, removes, metadata)


def picked(routed: Routed, wire: Wire) -> bytes:
    """The answer to the headers of a request that goes on."""
    return wire.picked(pick(routed))


def request_headers() -> ProcessingResponse:
    """The answer to request headers while it is the body that decides."""
    return ProcessingResponse(request_headers=HeadersResponse())


def response_headers(sets: Iterable[tuple[str, str]] = (), modes: tuple[int, int] | None = None) -> bytes:
    """The answer to response headers: the load report is not the client's business. `modes`: other body modes to ask for, of
    requests and of responses; a gateway that does not allow it goes on as before."""
    return _responded(tuple(sets), modes)


@functools.lru_cache(maxsize=4096)
def _responded(sets: tuple[tuple[str, str], ...], modes: tuple[int, int] | None) -> bytes:
    """The answer, which is the same for all answers of one replica with one model."""
    answer = ProcessingResponse(response_headers=_RESPONDED)
    for name, value in sets:
        overwrite(answer.response_headers.response.header_mutation, name, value)
    if modes is not None:
        of_request, of_response = modes
        answer.mode_override.request_body_mode = of_request  # type: ignore[assignment] - an open enum
        answer.mode_override.response_body_mode = of_response  # type: ignore[assignment]
    return answer.SerializeToString()


def request_body(routed: Routed) -> ProcessingResponse:
    """Return the answer to a buffered body. Its content length must be right, unlike that of a streamed body."""
    answer = ProcessingResponse()
    common = answer.request_body.response
    send_on(answer, common, pick(routed))
    if routed.body is not None:
        common.body_mutation.body = routed.body
        overwrite(common.header_mutation, "content-length", str(len(routed.body)))
    return answer


def streamed_request_body(body: bytes, ends: bool, wire: Wire) -> Iterator[bytes]:
    """The whole body again, in chunks; one empty chunk for an empty body. `ends`: no trailers follow."""
    for chunk, last in _chunks(body):
        yield wire.chunk(chunk, last and ends)


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
        streamed = answer.response_body.response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = chunk, last and ends
        passed.append(answer)
    return passed


def request_trailers() -> ProcessingResponse:
    """Request trailers pass unchanged."""
    return ProcessingResponse(request_trailers=TrailersResponse())


def response_trailers() -> ProcessingResponse:
    """Response trailers pass unchanged."""
    return ProcessingResponse(response_trailers=TrailersResponse())


def _chunks(body: bytes) -> Iterator[tuple[bytes, bool]]:
    """`body` in pieces that Envoy takes, at least one, and whether each is the last."""
    for at in range(0, max(len(body), 1), CHUNK_BYTES):
        yield body[at : at + CHUNK_BYTES], at + CHUNK_BYTES >= len(body)


def immediate(answer: Answered) -> ProcessingResponse:
    """The gateway's own answer."""
    response = ImmediateResponse(
        status=HttpStatus(code=answer.status),  # type: ignore[arg-type] - an enum of HTTP's numbers
        body=answer.body,
        details=f"penstock_{answer.reason}",
    )
    for name, value in [("content-type", "application/json"), *answer.headers]:
        overwrite(response.headers, name, value)
    return ProcessingResponse(immediate_response=response)


def refusal(refused: Refused) -> Answered:
    """A refusal as OpenAI's clients read it."""
    kind = _KINDS.get(refused.status, "server_error")
    sets = [(headers.REASON, refused.reason), *refused.sets]
    if refused.retry_after_s is not None:
        sets.append(("retry-after", str(refused.retry_after_s)))
    body = orjson.dumps(error_body(str(refused), kind, param=refused.param, code=refused.code))
    return Answered(status=refused.status, body=body, headers=sets, reason=refused.reason)
