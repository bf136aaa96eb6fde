"""A picker of a hundred lines that keeps the protocol, except for one fault at a time: what the suite itself is tested on."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import grpc
import orjson
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from penstock.epp_conformance import protocol
from penstock.epp_conformance._pb.envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from penstock.epp_conformance._pb.envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from penstock.epp_conformance._pb.envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from penstock.epp_conformance._pb.envoy.service.ext_proc.v3.external_processor_pb2_grpc import (
    ExternalProcessorServicer,
    add_ExternalProcessorServicer_to_server,
)

MODEL = "tiny"
CHUNK = 62_000


class Refusal(Exception):
    """Status and message."""


@dataclass
class Request:
    """What is known of one stream."""

    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    hint: object = ...
    config: bool = False
    response_duplex: bool = True
    done: bool = False
    over: bool = False
    held: bytes = b""


class SmallPicker(ExternalProcessorServicer):
    """Serves FULL_DUPLEX_STREAMED in turn over `endpoints`; `fault` is one of those that `test_conformance_faults.py` lists."""

    def __init__(self, endpoints: list[str], fault: str = "") -> None:
        self._endpoints, self._fault = endpoints, fault
        self._turn = itertools.count()
        self._busy = asyncio.Lock()

    async def Process(
        self, messages: AsyncIterator[ProcessingRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[ProcessingResponse]:
        request = Request()
        async with self._busy if self._fault == "one_at_a_time" else contextlib.nullcontext():
            async for message in messages:
                if message.observability_mode and self._fault != "answers_observers":
                    continue
                try:
                    answers = list(self._answers(request, message))
                except Refusal as refusal:
                    request.done = request.over = True
                    status, text = refusal.args
                    if self._fault == "hangs_on_refusals":
                        await asyncio.Event().wait()
                    if self._fault == "refuses_by_grpc":
                        await context.abort(grpc.StatusCode.UNAVAILABLE, text)
                    answers = self._refused(status, text)
                except NotImplementedError as error:
                    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
                for answer in answers:
                    yield answer
                if request.over:
                    return

    # --- the phases ---

    def _answers(self, request: Request, message: ProcessingRequest) -> Iterator[ProcessingResponse]:
        kind = message.WhichOneof("request")
        self._read_hint(request, message)
        if kind == "request_headers":
            fields = message.request_headers.headers.headers
            request.headers = {h.key: h.raw_value.decode("latin-1") for h in fields}
            request.config = message.HasField("protocol_config")
            if request.config:
                config = message.protocol_config
                request.response_duplex = config.response_body_mode == ProcessingMode.FULL_DUPLEX_STREAMED
                duplex = config.request_body_mode == ProcessingMode.FULL_DUPLEX_STREAMED
                if not (duplex or message.request_headers.end_of_stream):
                    raise NotImplementedError("request_body_mode: FULL_DUPLEX_STREAMED alone is served")
            elif self._fault == "needs_protocol_config":
                raise NotImplementedError("there is no protocol_config")
            if message.request_headers.end_of_stream:
                request.done = True
                yield self._picked(request)
        elif kind == "request_body":
            if request.done and self._fault != "answers_duplicates":
                return
            if not request.headers:
                raise NotImplementedError("a body without headers")
            request.body += message.request_body.body
            if message.request_body.end_of_stream:
                yield from self._sent_on(request, True)
        elif kind == "request_trailers" and self._fault != "ignores_trailers":
            if not request.done:
                yield from self._sent_on(request, self._fault == "ends_before_trailers")
            answer = ProcessingResponse()
            answer.request_trailers.SetInParent()
            yield answer
        elif kind in ("response_headers", "response_body", "response_trailers"):
            yield from self._response(request, message, kind)

    def _sent_on(self, request: Request, ends: bool) -> Iterator[ProcessingResponse]:
        request.done = True
        body, fault = request.body, self._fault
        fields = {} if fault == "reads_no_body" else _checked(body)
        if fault == "other_bytes":
            body = orjson.dumps(fields)
        if fault == "loses_a_chunk":
            body = body[:-1]
        size = 10 * CHUNK if fault == "large_chunks" else CHUNK
        chunks: list[ProcessingResponse] = []
        for at in range(0, max(len(body), 1), size):
            answer = ProcessingResponse()
            mutation = answer.request_body.response.body_mutation
            if fault == "no_streamed_response":
                mutation.body = body
            else:
                mutation.streamed_response.body = body[at : at + size]
                last = at + size >= len(body)
                mutation.streamed_response.end_of_stream = ends and (last or fault == "ends_early") and fault != "never_ends"
            chunks.append(answer)
        head = self._picked(request)
        yield from [*chunks, head] if fault == "body_first" else [head, *chunks]

    def _response(self, request: Request, message: ProcessingRequest, kind: str) -> Iterator[ProcessingResponse]:
        if self._fault == "crashes_on_responses":
            raise RuntimeError("no luck")
        answer = ProcessingResponse()
        getattr(answer, kind).SetInParent()
        if kind == "response_body" and request.response_duplex:
            body = message.response_body.body
            ends = message.response_body.end_of_stream
            if self._fault == "holds_events":
                request.held, body = (b"", request.held + body) if ends else (body, request.held)
            elif self._fault == "plain_response_bodies":
                yield answer
                return
            for at in range(0, max(len(body), 1), CHUNK):
                chunk = ProcessingResponse()
                streamed = chunk.response_body.response.body_mutation.streamed_response
                streamed.body, streamed.end_of_stream = body[at : at + CHUNK], ends and at + CHUNK >= len(body)
                if body or self._fault != "holds_events":
                    yield chunk
            return
        yield answer

    # --- the pick ---

    def _read_hint(self, request: Request, message: ProcessingRequest) -> None:
        fields = message.metadata_context.filter_metadata.get(protocol.SUBSET_NAMESPACE)
        if fields is None or protocol.SUBSET not in fields.fields:
            return
        if self._fault == "reads_hints_on_headers_alone" and message.WhichOneof("request") != "request_headers":
            return
        if self._fault == "reads_hints_on_bodies_alone" and message.WhichOneof("request") != "request_body":
            return
        value = fields.fields[protocol.SUBSET]
        items = value.list_value.values if value.WhichOneof("kind") == "list_value" else [value]
        if value.WhichOneof("kind") == "string_value" and self._fault == "takes_string_hints_for_none":
            return
        request.hint = [part.strip() for item in items for part in item.string_value.split(",")]

    def _allowed(self, request: Request) -> list[str]:
        first = next(self._turn) % len(self._endpoints)
        endpoints = self._endpoints[first:] + self._endpoints[:first]
        if request.hint is ...:
            return endpoints
        hint = [item for item in request.hint if item]  # type: ignore[attr-defined]
        if self._fault == "empty_hints_fail_open" and not hint:
            return endpoints
        if self._fault == "ignores_ports":
            hint = [item.rpartition(":")[0] or item for item in hint]
        allowed = [e for e in endpoints if e in hint or e.rpartition(":")[0].strip("[]") in hint]
        return [*allowed, *endpoints] if self._fault == "falls_back_outside" and allowed else allowed

    def _picked(self, request: Request) -> ProcessingResponse:
        allowed, fault = list(dict.fromkeys(self._allowed(request))), self._fault
        if not allowed:
            raise Refusal(503, "nobody is ready")
        if fault == "believes_clients" and protocol.DESTINATION in request.headers:
            allowed = [request.headers[protocol.DESTINATION]]
        destination = "r0:8000" if fault == "names_pods" else ",".join(allowed)
        answer = ProcessingResponse()
        common = answer.request_headers.response
        common.clear_route_cache = fault != "keeps_the_route"
        sets = {protocol.DESTINATION: destination}
        if fault == "copies_headers":
            sets = {name: value for name, value in request.headers.items() if name[0] != ":"} | sets
        if fault == "touches_the_host":
            sets["host"] = "elsewhere"
        for name, value in sets.items():
            option = common.header_mutation.set_headers.add(append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD)
            option.header.key, option.header.raw_value = name, value.encode("latin-1")
            if fault == "appends":
                option.append_action = HeaderValueOption.APPEND_IF_EXISTS_OR_ADD
            if fault == "says_values_twice":
                option.header.value = value
        removed = () if fault == "passes_forged_headers" else (protocol.SUBSET, protocol.DESTINATION_SERVED)
        common.header_mutation.remove_headers.extend(removed)
        if fault == "removes_what_it_sets":
            common.header_mutation.remove_headers.append(protocol.DESTINATION)
        if fault != "no_metadata":
            said = "10.9.9.9:1" if fault == "other_metadata" else destination
            namespace = answer.dynamic_metadata.fields[protocol.METADATA_NAMESPACE].struct_value
            namespace.fields[protocol.DESTINATION].string_value = said
        if fault == "no_header":
            del common.header_mutation.set_headers[:]
        return answer

    def _refused(self, status: int, text: str) -> list[ProcessingResponse]:
        answer, fault = ProcessingResponse(), self._fault
        immediate = answer.immediate_response
        immediate.status.code = 500 if fault == "refuses_with_500" else status  # type: ignore[assignment]
        immediate.details = "refused"
        body = {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": None}}
        immediate.body = text.encode() if fault == "refuses_in_plain_text" else orjson.dumps(body)
        sets = {"content-type": "application/json", "retry-after": "1", "x-refusal-reason": "why"}
        if fault == "refuses_without_retry_after":
            del sets["retry-after"]
        for name, value in sets.items():
            immediate.headers.set_headers.add().header.CopyFrom(_header(name, value))
        return [answer, answer] if fault == "refuses_twice" else [answer]


def _checked(body: bytes) -> dict[str, object]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise Refusal(400, "the body is no JSON") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("model"), str):
        raise Refusal(400, "there is no model")
    if fields["model"] != MODEL:
        raise Refusal(404, "the model does not exist")
    return fields


def _header(name: str, value: str) -> HeaderValue:
    option = HeaderValueOption()
    option.header.key, option.header.raw_value = name, value.encode()
    return option.header


@contextlib.asynccontextmanager
async def serving(endpoints: list[str], fault: str = "") -> AsyncIterator[int]:
    """A small picker; its port."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 32 * 2**20)])
    add_ExternalProcessorServicer_to_server(SmallPicker(endpoints, fault), server)
    if fault != "has_no_health":
        health = HealthServicer()
        for name in ("", "liveness", "readiness", "inference-extension", "envoy.service.ext_proc.v3.ExternalProcessor"):
            await health.set(name, HealthCheckResponse.SERVING)
        add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(grace=None)
