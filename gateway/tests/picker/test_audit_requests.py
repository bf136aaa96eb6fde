"""The audit log of a whole gateway: a line for each request, whatever became of it, and no secret in any of them."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from penstock.api import headers
from penstock.api.events import RequestFinished
from penstock.gateway._pb.envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from penstock.gateway._pb.envoy.service.accesslog.v3.als_pb2_grpc import AccessLogServiceStub
from penstock.gateway.picker.candidates import key_of

TENANTS = """
tenants:
  - name: search
    keys: [SECRET-key-of-search]
    maxConcurrent: 3
"""
KEY = {"authorization": "Bearer SECRET-key-of-search"}
ODD = {"cookie": "SECRET", "x-api-key": "SECRET-other", "x-unknown": "SECRET", "user-agent": "SECRET", headers.TENANT: "SECRET"}
PATH = "/v1/completions?key=SECRET"


@pytest.fixture
def tenants_file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(TENANTS)
    return path


@pytest.fixture
def audit_log(tmp_path: Path) -> Path:
    return tmp_path / "audit.log"


async def lines(world: Any, path: Path, count: int) -> list[dict[str, Any]]:
    """The first `count` lines, when there are so many."""
    await world.until(lambda: path.read_bytes().count(b"\n") >= count)
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


async def test_no_part_of_a_request_gets_into_the_log(world: Any, audit_log: Path) -> None:
    await world.ready()
    assert world.gateway._extproc.director.usual_heads is None, "each head leaves something in the log"
    answered, refused = world.stream(), world.stream
    body = world.completion(prompt="SECRET " * 20, user="SECRET", stop=["SECRET"], stream=True)
    answer = await answered.ask(body, path=PATH, **KEY, **ODD, **{headers.REQUEST_ID: "one"})
    [replica] = [it for it in world.replicas if it.endpoint == world.destinations(answer)[0]]
    noted = answer.dynamic_metadata.fields[headers.LOG_NAMESPACE].struct_value.fields[headers.BOOKING].string_value
    await answered.respond(**{"content-type": "Text/Event-Stream;charset=utf-8", "set-cookie": "SECRET"})
    await answered.end()
    world.gateway._follower.event(key_of(replica), RequestFinished("one", "stop", 21, 16, 9, 0.1))
    told = StreamAccessLogsMessage()
    entry = told.http_logs.log_entry.add()
    entry.common_properties.metadata.filter_metadata[headers.LOG_NAMESPACE].update({headers.BOOKING: noted})
    entry.request.path, entry.request.user_agent, entry.response.response_body_bytes = "/SECRET", "SECRET", 777
    als = AccessLogServiceStub(world.channel).StreamAccessLogs()
    await als.write(told)
    for fields, path, key in (
        (world.completion(model="SECRET"), PATH, KEY),  # no such model
        (world.completion(), "/v1/SECRET", KEY),  # no such path
        (world.completion(), PATH, {"authorization": "Bearer SECRET-nobody's"}),
        (b'{"model": "SECRET', PATH, KEY),  # no JSON
        (world.completion(priority="SECRET", n="SECRET", model=["SECRET"]), PATH, KEY),
        (None, "/v1/models/SECRET", KEY),
        (None, "/v1/models?SECRET", KEY),
    ):
        await refused().ask(fields, path=path, **{**ODD, **key})
    found = await lines(world, audit_log, 8)
    assert b"SECRET" not in audit_log.read_bytes()
    summary = {(it["status"], it["reason"], it["tenant"], it["model"], it["path"]) for it in found}
    assert summary == {
        (200, None, "search", "ns/tiny", "/v1/completions"),
        (404, "model_not_found", "search", None, "/v1/completions"),
        (404, "unknown_path", None, None, None),
        (401, "invalid_api_key", None, None, "/v1/completions"),
        (400, "invalid_json", "search", None, "/v1/completions"),
        (400, "invalid_type", "search", None, "/v1/completions"),
        (404, "model_not_found", "search", None, "/v1/models"),
        (200, "models", "search", None, "/v1/models"),
    }
    [served] = [it for it in found if it["replica"]]
    assert (served["replica"], served["request_id"], served["bytes_sent"]) == (replica.name, "one", 777)
    assert (served["output_tokens"], served["cached_tokens"], served["finish_reason"]) == (9, 16, "stop")
    (other,) = {it.name for it in world.replicas} - {replica.name}
    assert (served["policy"], served["next_best"]) == ("Cost", other)
    assert 0 < served["score"] <= served["next_score"]
    assert 0 <= served["waited_ms"] <= served["ttft_ms"] <= served["duration_ms"]
    als.cancel()
    async with world.http.get("/metrics") as response:
        text = await response.text()
    assert 'penstock_audit_lines_total{outcome="written"} 8.0' in text
    assert 'penstock_picker_refusals_total{reason="unknown_path"} 1.0' in text


async def test_who_leaves_and_who_is_turned_away_early_have_their_lines(world: Any, audit_log: Path) -> None:
    world.fleet(hold_timeout_s=60.0)
    await world.until(lambda: world.state.directory.names.get("tiny"))
    waiting = world.stream()
    asked = asyncio.create_task(waiting.ask(world.completion(), **KEY))
    await world.until(lambda: world.state.held)
    asked.cancel()
    waiting.call.cancel()
    world.gateway._extproc.ceiling._most_bytes = 10
    assert world.error(await world.stream().ask(world.completion(), **KEY))[0] == 503
    left, early = sorted(await lines(world, audit_log, 2), key=lambda it: it["status"])
    assert (left["status"], left["reason"], left["tenant"]) == (499, "client_gone", "search")
    assert (early["status"], early["reason"]) == (503, "gateway_overloaded")
