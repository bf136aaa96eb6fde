"""The HTTP surface in front of a core that does what the test says."""

import asyncio
import json
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from frontend_fakes import FakeCore, step_frame
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from penstock.api import headers, load_report, metrics
from penstock.engine.config import ModelConfig, SchedulingPolicy
from penstock.engine.frontend.async_llm import AsyncLLM, State
from penstock.engine.frontend.http.server import ApiServer
from penstock.engine.frontend.progress import Progress
from penstock.engine.messages import QUEUE_FULL, QUEUE_TIMEOUT, REQUEST_TIMEOUT, TENANT_QUEUE_FULL, Finished, FinishReason
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.processor import PromptProcessor

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class Site:
    """A served engine and a client of it."""

    def __init__(self, core: FakeCore, llm: AsyncLLM, server: ApiServer, client: aiohttp.ClientSession, port: int) -> None:
        self.core, self.llm, self.server, self.client, self.port = core, llm, server, client, port

    async def chat(self, **fields: Any) -> aiohttp.ClientResponse:
        body = {"model": "m", "messages": [{"role": "user", "content": "the mill"}], **fields}
        return await self.client.post(CHAT, json=body)

    async def live(self, index: int = 0) -> None:
        """Waits until the core has a request."""
        await until(lambda: any(request.index == index for request in self.core.added))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
async def serve(tokenizer_files: Path) -> AsyncIterator[Callable[..., Awaitable[Site]]]:
    closers: list[Callable[[], Awaitable[None]]] = []

    async def start(core: FakeCore | None = None, ready: bool = True, policy: SchedulingPolicy = "fcfs") -> Site:
        core = core or FakeCore()
        names = ("m", "alias")
        model = ModelConfig(
            path=tokenizer_files, served_names=names, architecture="x", dtype="float32", max_model_len=64, eos_token_ids=(1,)
        )
        bundle = PromptBundle.from_checkpoint(tokenizer_files, served_names=names, block_size=4, hash_seed="s", max_model_len=64)
        llm = AsyncLLM(core, model, PromptProcessor(bundle), policy=policy)
        server = ApiServer(llm)
        runner = server.runner(shutdown_timeout=0.2)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        if ready:
            await llm.start()
        port = runner.addresses[0][1]
        client = aiohttp.ClientSession(f"http://127.0.0.1:{port}")
        closers.extend([client.close, runner.cleanup, llm.close])
        return Site(core, llm, server, client, port)

    yield start
    for close in closers:
        await close()


def says(tokenizer: Tokenizer, text: str) -> FakeCore:
    """A core that answers every request with a text."""
    return FakeCore(lambda _request: (tokenizer.encode(text).ids, FinishReason.LENGTH))


async def error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    assert response.content_type == "application/json"
    body = await response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.req("EG-14")
async def test_a_stream_is_framed_as_server_sent_events(serve: Any, byte_level: Tokenizer) -> None:
    site = await serve(says(byte_level, "naïve 🎻 水車"))
    response = await site.chat(stream=True, stream_options={"include_usage": True})
    assert response.status == 200 and response.content_type == "text/event-stream"
    raw = await response.read()
    assert raw.endswith(b"data: [DONE]\n\n") and raw.count(b"[DONE]") == 1
    events = raw.decode().split("\n\n")
    assert events.pop() == "" and events.pop() == "data: [DONE]"
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    chunks = [json.loads(event[6:]) for event in events]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == "naïve 🎻 水車"
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]].count("length") == 1
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == len(byte_level.encode("naïve 🎻 水車").ids)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_seeds_differ_between_choices_and_salts_and_priorities_travel(serve: Any, byte_level: Tokenizer) -> None:
    site = await serve(says(byte_level, "x"), policy="priority")
    response = await site.chat(n=3, seed=2**63 - 1, cache_salt="t", priority=-3)
    assert [choice["index"] for choice in (await response.json())["choices"]] == [0, 1, 2]
    assert [request.sampling.seed for request in site.core.added] == [2**63 - 1, 0, 1]
    assert {(request.cache_salt, request.priority) for request in site.core.added} == {("t", -3)}
    await site.chat()
    await site.chat()
    assert len({request.sampling.seed for request in site.core.added[-2:]}) == 2  # drawn


async def test_a_priority_is_refused_where_arrival_decides(serve: Any) -> None:
    site = await serve()
    response = await site.chat(priority=1)
    assert response.status == 400 and (await response.json())["error"]["param"] == "priority" and not site.core.added


@pytest.mark.parametrize(("policy", "expected"), [("priority", 7), ("fcfs", 0)])
async def test_a_priority_that_the_gateway_grants_counts_where_priorities_do(
    serve: Any, byte_level: Tokenizer, policy: str, expected: int
) -> None:
    site = await serve(says(byte_level, "x"), policy=policy)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    response = await site.client.post(CHAT, json=body, headers={"x-penstock-priority": "7"})
    assert response.status == 200
    assert [request.priority for request in site.core.added] == [expected]
    response = await site.client.post(CHAT, json=body, headers={"x-penstock-priority": "high"})
    assert response.status == 400 and (await response.json())["error"]["param"] == "x-penstock-priority"


@pytest.mark.req("LIM-04")
async def test_tenant_and_patience_travel_in_headers(serve: Any, byte_level: Tokenizer) -> None:
    site = await serve(says(byte_level, "x"))
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    asked = {headers.TENANT: "a", headers.TIMEOUT: "1500"}
    await (await site.client.post("/v1/chat/completions", json=body, headers=asked)).read()
    (request,) = site.core.added
    assert request.tenant == "a" and request.deadline == request.arrival_time + 1.5
    for value in ("ä", "x" * 257):
        response = await site.client.post("/v1/chat/completions", json=body, headers={headers.TENANT: value})
        assert response.status == 400 and (await response.json())["error"]["param"] == headers.TENANT
    for value in ("0", "-1", "1.5", "soon", "9" * 11):
        response = await site.client.post("/v1/chat/completions", json=body, headers={headers.TIMEOUT: value})
        assert response.status == 400 and (await response.json())["error"]["param"] == headers.TIMEOUT


@pytest.mark.req("RL-03", "RL-18")
@pytest.mark.parametrize(("reason", "told"), [(FinishReason.REPETITION, "repetition"), (FinishReason.IGNORED, "length")])
@pytest.mark.parametrize("stream", [False, True])
async def test_clients_can_tell_ends_apart(serve: Any, reason: FinishReason, told: str, stream: bool) -> None:
    site = await serve()
    asking = asyncio.create_task(site.chat(stream=stream))
    await site.live(0)
    site.core.say(step_frame({}, [Finished(0, reason, error="too long")]))
    response = await asking
    text = await response.text()
    assert response.status == 200 and f'"finish_reason":"{told}"' in text
    lines = (await (await site.client.get("/metrics")).text()).splitlines()
    (counted,) = [line for line in lines if line.startswith(metrics.REQUEST_SUCCESS) and f'"{told}"' in line]
    assert counted.endswith(" 1.0")


@pytest.mark.parametrize(
    ("code", "status", "retriable"),
    [(QUEUE_FULL, 503, True), (TENANT_QUEUE_FULL, 429, True), (QUEUE_TIMEOUT, 503, True), (REQUEST_TIMEOUT, 504, False)],
)
async def test_what_the_core_refuses_has_a_status_of_its_own(serve: Any, code: str, status: int, retriable: bool) -> None:
    site = await serve()
    asking = asyncio.create_task(site.chat())
    await site.live(0)
    site.core.say(step_frame({}, [Finished(0, FinishReason.ERROR, error="why", code=code)]))
    response = await asking
    assert (response.status, response.headers.get(headers.RETRIABLE) == "true") == (status, retriable)
    assert ("retry-after" in response.headers) == retriable and (await response.json())["error"]["code"] == code


async def test_equal_prompts_of_a_list_differ_unless_a_seed_is_given(serve: Any, byte_level: Tokenizer) -> None:
    site = await serve(says(byte_level, "x"))
    body = {"model": "m", "prompt": ["the mill", "the mill"], "n": 2}
    assert (await site.client.post(COMPLETIONS, json=body)).status == 200
    assert len({request.sampling.seed for request in site.core.added}) == 4
    assert (await site.client.post(COMPLETIONS, json={**body, "seed": 7})).status == 200
    assert [request.sampling.seed for request in site.core.added[4:]] == [7, 8, 7, 8]


@pytest.mark.parametrize("encoding", ["gzip", "br", "nonsense"])
async def test_encoded_bodies_are_refused_in_openais_shape(serve: Any, encoding: str) -> None:
    site = await serve()
    response = await site.client.post(
        CHAT, data=b"{}", headers={"content-type": "application/json", "content-encoding": encoding}
    )
    assert response.status == 415
    error = await error_of(response)
    assert error["param"] == "content-encoding" and encoding in error["message"]


@pytest.mark.parametrize(
    ("path", "data", "status", "param"),
    [
        (CHAT, b"", 400, None),
        (CHAT, b"\x00garbage" * 400_000, 400, None),
        (CHAT, b"[]", 400, None),
        (CHAT, b'{"model": "m"}', 400, "messages"),
        (CHAT, b'{"model": "m", "messages": [], "colour": 1}', 400, "colour"),
        (CHAT, b'{"model": "m", "messages": []}', 400, "messages"),
        (CHAT, b'{"model": "other", "messages": []}', 404, "model"),
        (COMPLETIONS, b'{"model": "m", "prompt": 5}', 400, "prompt"),
        (COMPLETIONS, b'{"model": "m", "prompt": [99999]}', 400, "prompt"),
        (COMPLETIONS, json.dumps({"model": "m", "prompt": "the mill " * 64}).encode(), 400, "prompt"),
        (COMPLETIONS, json.dumps({"model": "m", "prompt": "x" * 3_000_000}).encode(), 400, "prompt"),
        (CHAT, b" " * (20 * 2**20 + 1), 413, None),
        ("/v1/unknown", b"{}", 404, None),
        ("/health", b"{}", 405, None),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else None,
)
async def test_bad_input_is_a_4xx_in_openais_shape(serve: Any, path: str, data: bytes, status: int, param: str | None) -> None:
    site = await serve()
    response = await site.client.post(path, data=data, headers={"content-type": "application/json"})
    error = await error_of(response)
    assert (response.status, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert (await site.client.get("/health")).status == 200
    assert site.core.added == []


async def test_other_content_is_refused(serve: Any) -> None:
    site = await serve()
    response = await site.client.post(CHAT, data="model=m", headers={"content-type": "text/plain"})
    assert (response.status, (await error_of(response))["param"]) == (415, "content-type")


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * 20000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_a_400_in_openais_shape_too(serve: Any, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    site = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    async with asyncio.timeout(60):
        writer.write(data)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")  # all of it: the connection ends
    writer.close()
    assert b" 400 " in head.splitlines()[0] and b"application/json" in head
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error" and "not valid HTTP" in error["message"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"], "the fault is the client's"
    assert (await site.client.get("/health")).status == 200


async def test_unknown_models_and_long_prompts_have_their_codes(serve: Any) -> None:
    site = await serve()
    assert (await error_of(await site.chat(model="other")))["code"] == "model_not_found"
    error = await error_of(await site.chat(max_tokens=64))
    assert error["code"] == "context_length_exceeded" and "64" in error["message"]


async def test_request_ids_are_echoed_given_or_refused(serve: Any, byte_level: Tokenizer) -> None:
    site = await serve(says(byte_level, "x"))
    body = {"model": "alias", "prompt": "x"}
    response = await site.client.post(COMPLETIONS, json=body, headers={"x-request-id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1" and (await response.json())["id"] == "cmpl-abc-1"
    assert (await response.json())["model"] == "m"
    assert site.core.added[-1].request_id == "abc-1"
    response = await site.client.post(COMPLETIONS, json=body)
    assert response.headers["x-request-id"] == site.core.added[-1].request_id
    response = await site.client.post(COMPLETIONS, json=body, headers={"x-request-id": "é"})
    assert (response.status, (await error_of(response))["param"]) == (400, "x-request-id")


@pytest.mark.parametrize(
    ("path", "fields", "prefix"),
    [
        (COMPLETIONS, {"prompt": "x"}, "cmpl-"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}]}, "chatcmpl-"),
        ("/v1/responses", {"input": "x"}, "resp_"),
    ],
)
async def test_a_body_names_its_request_where_no_header_does(
    serve: Any, byte_level: Tokenizer, path: str, fields: dict[str, Any], prefix: str
) -> None:
    site = await serve(says(byte_level, "x"))
    body = {"model": "m", "request_id": "mine", **fields}
    for given, name in (({}, "mine"), ({"x-request-id": "theirs"}, "theirs")):
        response = await site.client.post(path, json=body, headers=given)
        assert (response.headers["x-request-id"], (await response.json())["id"]) == (name, prefix + name)
        assert site.core.added[-1].request_id == name
    for bad in ("", "é", "a\nb", "a\n", "x" * 257):
        response = await site.client.post(path, json=body | {"request_id": bad})
        assert (response.status, (await error_of(response))["param"]) == (400, "request_id"), bad


@pytest.mark.req("RT-04")
@pytest.mark.parametrize("form", ["TEXT", "JSON", "BIN", "text", "Json"])
@pytest.mark.parametrize("stream", [True, False])
async def test_load_reports_ride_on_every_answer(serve: Any, byte_level: Tokenizer, form: str, stream: bool) -> None:
    site = await serve(says(byte_level, "x"))
    site.core.report(seq=7, running=3)
    await until(lambda: site.llm.load is not None)
    site.client.headers["endpoint-load-metrics-format"] = form
    for response in (await site.chat(stream=stream), await site.chat(colour=1), await site.client.get("/v1/models")):
        report = load_report.decode(response.headers["endpoint-load-metrics"])
        assert (report.seq, report.num_requests_running) == (7, 3)
    assert (await (await site.client.get("/load")).json())["seq"] == 7


@pytest.mark.req("RT-04")
@pytest.mark.parametrize("asked", [{}, {"endpoint-load-metrics-format": "XML"}])
async def test_no_load_report_where_none_is_asked_for_in_a_known_form(serve: Any, asked: dict[str, str]) -> None:
    site = await serve()
    site.core.report(seq=7)
    await until(lambda: site.llm.load is not None)
    response = await site.client.get("/v1/models", headers=asked)
    assert response.status == 200
    assert "endpoint-load-metrics" not in response.headers


async def test_the_prompt_bundle_is_fetched_once(serve: Any) -> None:
    site = await serve()
    response = await site.client.get("/prompt-bundle")
    bundle = PromptBundle.from_json(await response.read())
    assert bundle == site.llm.processor.bundle
    assert response.headers["etag"] == f'"{bundle.digest}"'
    again = await site.client.get("/prompt-bundle", headers={"if-none-match": response.headers["etag"]})
    assert (again.status, await again.read()) == (304, b"")
    other = await site.client.get("/prompt-bundle", headers={"if-none-match": '"other"'})
    assert other.status == 200


async def test_models_and_version(serve: Any) -> None:
    site = await serve()
    models = await (await site.client.get("/v1/models")).json()
    assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [("m", 64), ("alias", 64)]
    assert {(model["root"], model["parent"]) for model in models["data"]} == {(str(site.llm.model.path), None)}
    assert await (await site.client.get("/v1/models/alias")).json() == models["data"][1]
    missing = await site.client.get("/v1/models/org/none")
    assert (missing.status, (await missing.json())["error"]["code"]) == (404, "model_not_found")
    assert (await (await site.client.get("/version")).json())["version"]


async def test_the_page_of_the_api_loads_nothing_from_elsewhere(serve: Any) -> None:
    site = await serve()
    page = await site.client.get("/docs")
    text = await page.text()
    assert (page.status, page.content_type) == (200, "text/html") and 'lang="en"' in text
    assert not re.findall(r"(?:https?:)?//[\w.]+\.\w+|<link|<script src|@import", text)
    assert page.headers["content-security-policy"].startswith("default-src 'none';")


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium: apt-get install chromium")
async def test_a_browser_shows_every_endpoint_with_its_fields(serve: Any, tmp_path: Path) -> None:
    site = await serve()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", f"--user-data-dir={tmp_path}"]
    command = ["chromium", *flags, "--dump-dom", f"http://127.0.0.1:{site.port}/docs"]
    browser = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    async with asyncio.timeout(120):
        shown, _ = await browser.communicate()
    body = shown.decode().partition("<script>")[0]
    described = await (await site.client.get("/openapi.json")).json()
    assert [path for path in described["paths"] if f">{path}<" not in body] == []
    assert ">max_completion_tokens<" in body


@pytest.mark.req("MET-04")
async def test_metrics_have_the_shared_names(serve: Any, byte_level: Tokenizer) -> None:
    site = await serve(says(byte_level, "the mill"))
    site.core.report(running=2)
    await (await site.chat()).read()
    families = {
        family.name: family for family in text_string_to_metric_families(await (await site.client.get("/metrics")).text())
    }
    shared = [metrics.NUM_REQUESTS_RUNNING, metrics.NUM_REQUESTS_WAITING, metrics.KV_CACHE_USAGE, metrics.PROMPT_TOKENS]
    shared += [metrics.GENERATION_TOKENS, metrics.REQUEST_SUCCESS, metrics.PREEMPTIONS, metrics.TIME_TO_FIRST_TOKEN]
    shared += [metrics.INTER_TOKEN_LATENCY, metrics.E2E_LATENCY, metrics.PREFIX_CACHE_QUERIES, metrics.PREFIX_CACHE_HITS]
    assert set(shared) <= set(families)
    assert families[metrics.NUM_REQUESTS_RUNNING].samples[0].value == 2
    assert families[metrics.PREEMPTIONS].samples[0].value == 2
    reasons = {sample.labels["finished_reason"]: sample.value for sample in families[metrics.REQUEST_SUCCESS].samples}
    assert reasons == {"stop": 0, "length": 1, "repetition": 0, "abort": 0, "error": 0}


@pytest.mark.req("RT-07")
async def test_the_server_counts_what_it_answers_and_forgets_who_has_gone(serve: Any) -> None:
    site = await serve()  # nothing is ever sampled
    site.core.report(seq=1)
    await until(lambda: site.llm.load is not None)

    async def load() -> int:
        return (await (await site.client.get("/load")).json())["server_load"]

    assert await load() == 0
    tasks = [asyncio.create_task(site.chat(stream=number % 2 == 0)) for number in range(3)]
    await until(lambda: len(site.core.added) == 3)
    assert await load() == 3
    for task in tasks:
        task.cancel()
    await until(lambda: site.server.active.idle)
    assert await load() == 0


@pytest.mark.req("EG-12")
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_aborts_its_request(serve: Any, stream: bool) -> None:
    site = await serve()
    task = asyncio.create_task(site.chat(stream=stream, n=2))
    await site.live(index=1)
    site.core.say(step_frame({0: [70], 1: [70]}))
    await asyncio.sleep(0.05)
    if stream:
        (await task).close()
    else:
        task.cancel()
    await until(lambda: site.core.aborted == [[0, 1]])
    assert site.server.active.idle


async def test_errors_before_the_first_token_are_statuses(serve: Any) -> None:
    site = await serve()
    task = asyncio.create_task(site.chat(stream=True))
    await site.live()
    site.core.say(step_frame({}, [Finished(0, FinishReason.ERROR, error="full", code=QUEUE_FULL)]))
    response = await task
    assert (response.status, response.headers["x-penstock-retriable"]) == (503, "true")
    assert int(response.headers["retry-after"]) > 0
    await error_of(response)


@pytest.mark.req("EG-20")
async def test_the_cores_death_ends_everything_and_is_told(serve: Any) -> None:
    site = await serve()
    stream = asyncio.create_task(site.chat(stream=True))
    await site.live(0)
    plain = asyncio.create_task(site.chat())
    await site.live(1)
    site.core.say(step_frame({0: [70], 1: [70]}))
    response = await stream
    site.core.die("the engine core was killed by signal 9")
    raw = await response.read()
    assert b"[DONE]" not in raw
    assert json.loads(raw.decode().split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
    answer = await plain
    assert (answer.status, answer.headers["x-penstock-retriable"]) == (503, "true")
    assert site.llm.failed.is_set()
    for path in ("/health", "/live", "/ready"):
        probe = await site.client.get(path)
        assert probe.status == 503 and "signal 9" in (await error_of(probe))["message"]
    assert (await site.chat()).status == 503


async def test_one_failed_request_leaves_the_others_alone(serve: Any, byte_level: Tokenizer) -> None:
    site = await serve()
    failing = asyncio.create_task(site.chat())
    await site.live(0)
    other = asyncio.create_task(site.chat())
    await site.live(1)
    site.core.say(step_frame({1: [70]}, [Finished(0, FinishReason.ERROR, error="logits are NaN")]))
    site.core.say(step_frame({}, [Finished(1, FinishReason.STOP)]))
    assert (await failing).status == 500 and "NaN" in (await error_of(await failing))["message"]
    assert (await other).status == 200
    assert (await site.client.get("/health")).status == 200


@pytest.mark.req("LD-13")
async def test_nothing_is_taken_before_the_core_is_ready_nor_while_draining(serve: Any) -> None:
    site = await serve(ready=False)
    assert (await site.client.get("/load")).status == 503
    for state, code in ((State.STARTING, "not_ready"), (State.DRAINING, "draining")):
        site.llm.state = state
        for path in ("/health", "/ready"):
            probe = await site.client.get(path)
            assert (probe.status, (await error_of(probe))["code"]) == (503, code)
        assert (await site.client.get("/live")).status == 200, "a restart would not help"
        response = await site.chat()
        assert (response.status, response.headers["x-penstock-retriable"]) == (503, "true")
        assert response.headers["connection"] == "close"
        assert (await error_of(response))["code"] == code


async def test_a_drain_waits_for_what_runs(serve: Any) -> None:
    site = await serve()
    task = asyncio.create_task(site.chat(stream=True))
    await site.live()
    site.core.say(step_frame({0: [70]}))
    site.llm.state = State.DRAINING
    drained = asyncio.create_task(site.server.active.drained())
    response = await task
    assert not drained.done()
    site.core.say(step_frame({0: [70]}, [Finished(0, FinishReason.LENGTH)]))
    assert (await response.read()).endswith(b"data: [DONE]\n\n")
    await asyncio.wait_for(drained, 60)


async def test_a_drain_does_not_wait_for_a_body_that_never_comes(serve: Any) -> None:
    site = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nexpect: 100-continue\r\ncontent-length: 99\r\n\r\n"
    )
    writer.write(head.encode())
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"  # its handler is about to run
    writer.write(b"{")
    answer = asyncio.create_task(reader.readuntil(b"}}"))
    assert (await site.client.get("/version")).status == 200  # and has had its turn
    assert site.server.active.idle
    site.llm.state = State.DRAINING
    await site.server.active.drained()
    writer.write(b" " * 98)
    assert b'"code":"draining"' in await answer
    writer.close()


async def test_a_client_that_does_not_read_stalls_nobody(serve: Any) -> None:
    site = await serve()
    slow = asyncio.create_task(site.chat(stream=True, logprobs=False))
    await site.live(0)
    reader = asyncio.create_task(site.chat(stream=True))
    await site.live(1)
    site.core.say(step_frame({0: [70], 1: [70]}))
    await slow  # and never reads from here on
    for _ in range(20_000):
        site.core.say(step_frame({0: [70, 71]}))
    site.core.say(step_frame({1: [71]}, [Finished(1, FinishReason.LENGTH)]))
    raw = await asyncio.wait_for((await reader).read(), 60)
    assert raw.endswith(b"data: [DONE]\n\n")
    site.core.say(step_frame({0: [71]}, [Finished(0, FinishReason.LENGTH)]))
    chunks = [json.loads(event[6:]) for event in (await (await slow).text()).split("\n\n")[:-2]]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert len(text) == len(site.llm.vocabulary.bytes_of(70)) + 20_000 * 2 + 1
    assert len(chunks) < 20_000


@pytest.mark.parametrize("path", ["/health", "/live"])
async def test_health_and_liveness_are_judged_by_progress(serve: Any, path: str) -> None:
    site = await serve()
    assert (await site.client.get(path)).status == 200
    site.llm.ranks[0].progress = Progress(time.monotonic() - 31, 30.0)
    response = await site.client.get(path)
    assert response.status == 503 and "said nothing" in (await error_of(response))["message"]


async def test_control_endpoints_are_there_only_when_asked_for(serve: Any) -> None:
    site = await serve()
    for path in ("/sleep", "/pause", "/reload_weights", "/reset_prefix_cache"):
        assert (await site.client.post(path)).status == 404
