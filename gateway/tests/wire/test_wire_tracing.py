"""One trace from a client's header through Envoy, picker and a real engine, told to a collector that reads OTLP."""

import base64
import itertools
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from google.protobuf import json_format
from wire_waiting import eventually

from penstock.gateway._pb.opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from penstock.gateway._pb.opentelemetry.proto.trace.v1.trace_pb2 import Span

ENGINE = Path(__file__).parents[3] / "examples/models/penstock-tiny"
TRACE, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TOKENS = "gen_ai.usage.input_tokens"


@dataclass
class Collector:
    """An OTLP receiver over HTTP: protobuf from Envoy, JSON from us."""

    url: str = ""
    spans: list[tuple[str, Span]] = field(default_factory=list)
    """Each with its `service.name`."""

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        data = ExportTraceServiceRequest()
        if request.content_type == "application/json":
            json_format.Parse(json.dumps(_in_base64(json.loads(body))), data)
        else:
            data.ParseFromString(body)
        for resource in data.resource_spans:
            names = {it.key: it.value.string_value for it in resource.resource.attributes}
            self.spans += [
                (names["service.name"], span) for scope in resource.instrumentation_library_spans for span in scope.spans
            ]
        return web.json_response({})

    def of(self, service: str, trace: str) -> list[Span]:
        return [span for its, span in self.spans if its == service and span.trace_id.hex() == trace]


def _in_base64(message: Any) -> Any:
    """OTLP's JSON has ids in hexadecimal, protobuf's in base64; and the messages that come with Envoy's call a scope by its old
    name."""
    if isinstance(message, list):
        return [_in_base64(each) for each in message]
    if not isinstance(message, dict):
        return message
    ids = ("traceId", "spanId", "parentSpanId")
    names = {"scopeSpans": "instrumentationLibrarySpans", "scope": "instrumentationLibrary"}
    read = {k: base64.b64encode(bytes.fromhex(v)).decode() if k in ids else _in_base64(v) for k, v in message.items()}
    return {names.get(key, key): value for key, value in read.items()}


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    its, app = Collector(), web.Application()
    app.router.add_post("/v1/traces", its.take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    its.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    yield its
    await runner.cleanup()


def start(folder: Path, processes: Any, ports: list[int], fleet: Any, *flags: str) -> None:
    port, grpc_port, http_port = (str(it) for it in ports)
    (folder / "fleet.json").write_bytes(msgspec.json.encode(fleet))
    gateway = ["gateway", "--discovery", f"file:{folder / 'fleet.json'}", "--name", "test", "--listener-host", "127.0.0.1"]
    gateway += ["--grpc-port", grpc_port, "--http-port", http_port, "--listener-port", port]
    processes.start("gateway", *gateway, *flags)
    processes.start("envoy", "envoy", "--gateway", f"127.0.0.1:{grpc_port}", "--concurrency", "1", "--node-id", "test")


async def ask(client: aiohttp.ClientSession, port: int, traceparent: str) -> int:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    async with client.post(url, json=body, headers={"traceparent": traceparent}) as response:
        await response.read()
        return response.status


def values(span: Span) -> dict[str, Any]:
    found = {it.key: it.value for it in span.attributes}
    return {key: getattr(value, value.WhichOneof("value")) for key, value in found.items()}


@pytest.mark.req("XC-05")
async def test_a_request_is_one_trace_from_the_client_to_the_decoder(
    tmp_path: Path, processes: Any, ports: Any, fleet_of: Any, client: Any, collector: Collector, engine: Any
) -> None:
    own, events, replay, *rest = ports(6)
    serve = ["serve", str(ENGINE), "--served-model-name", "tiny", "--port", str(own), "--events-port", str(events)]
    serve += ["--replay-port", str(replay), "--num-gpu-blocks-override", "64", "--max-model-len", "512"]
    processes.start("engine", *serve, "--otlp-traces-endpoint", collector.url)
    replica = (await engine("stands-for-it")).replica(port=own, events_port=events, replay_port=replay)
    start(tmp_path, processes, rest, fleet_of(replica), "--otlp-traces-endpoint", collector.url)

    async def answers() -> bool:
        return await ask(client, rest[0], f"00-{'1' * 32}-{CLIENT}-00") == 200  # of a trace that nobody records

    await eventually(answers, limit_s=90.0)
    numbers = itertools.count(1)

    async def counts() -> bool:  # with the replica's tokenizer: until the gateway has fetched it, it guesses
        trace = f"{next(numbers):032x}"
        assert await ask(client, rest[0], f"00-{trace}-{CLIENT}-01") == 200

        async def told() -> bool:
            return bool(collector.of("penstock-gateway", trace) and collector.of("penstock-engine", trace))

        await eventually(told, limit_s=90.0)
        spans = [*collector.of("penstock-gateway", trace), *collector.of("penstock-engine", trace)]
        return len({values(span)[TOKENS] for span in spans if TOKENS in values(span)}) == 1

    await eventually(counts, limit_s=90.0)
    assert await ask(client, rest[0], f"00-{TRACE}-{CLIENT}-01") == 200

    async def all_there() -> bool:
        engine_spans = {span.name for span in collector.of("penstock-engine", TRACE)}
        names = [collector.of("penstock-envoy", TRACE), collector.of("penstock-gateway", TRACE)]
        return engine_spans == {"chat tiny", "queue", "prefill", "decode"} and len(names[0]) >= 2 and bool(names[1])

    await eventually(all_there, limit_s=90.0)
    envoy = {span.span_id: span for span in collector.of("penstock-envoy", TRACE)}
    [root] = [span for span in envoy.values() if span.parent_span_id.hex() == CLIENT]
    [pick] = collector.of("penstock-gateway", TRACE)
    assert envoy[pick.parent_span_id].parent_span_id == root.span_id, "below Envoy's span of the exchange"
    parts = {span.name: span for span in collector.of("penstock-engine", TRACE)}
    answer = parts.pop("chat tiny")
    assert answer.parent_span_id in envoy
    assert {span.parent_span_id for span in parts.values()} == {answer.span_id}
    assert parts["queue"].end_time_unix_nano == parts["prefill"].start_time_unix_nano
    assert parts["prefill"].end_time_unix_nano == parts["decode"].start_time_unix_nano
    assert root.start_time_unix_nano < pick.start_time_unix_nano < pick.end_time_unix_nano
    assert pick.end_time_unix_nano < answer.start_time_unix_nano < answer.end_time_unix_nano
    decision, request = values(pick), values(answer)
    assert (decision["penstock.replica"], decision["penstock.policy"]) == ("stands-for-it", "RoundRobin")
    assert decision["penstock.reasons"].values and decision["gen_ai.request.model"] == "tiny"
    assert decision["gen_ai.request.id"] == request["gen_ai.request.id"]
    assert request[TOKENS] == decision[TOKENS] > 0
    assert (request["gen_ai.usage.output_tokens"], request["gen_ai.operation.name"]) == (4, "chat")
    assert not [span for _, span in collector.spans if span.trace_id.hex() == "1" * 32], "whoever began it does not record it"


async def test_a_dead_collector_disturbs_nothing(
    tmp_path: Path, processes: Any, ports: Any, fleet_of: Any, client: Any, engine: Any
) -> None:
    its, (*rest, nobody) = await engine("only"), ports(4)
    with socket.socket() as silent:  # accepts, and never answers
        silent.bind(("127.0.0.1", nobody))
        silent.listen()
        start(
            tmp_path, processes, rest, fleet_of(its.replica()), "--otlp-traces-endpoint", f"http://127.0.0.1:{nobody}/v1/traces"
        )

        async def answers() -> bool:
            return await ask(client, rest[0], f"00-{TRACE}-{CLIENT}-01") == 200

        await eventually(answers, limit_s=90.0)
        for _ in range(20):
            assert await answers()

        async def said() -> bool:
            return "traces are lost" in processes.log("gateway")

        await eventually(said, limit_s=90.0)
        assert processes.log("gateway").count("traces are lost") == 1
        assert await answers()
