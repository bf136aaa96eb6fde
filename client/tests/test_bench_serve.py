"""`penstock bench serve` against a scripted server: what it asks, what it counts, what it says."""

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from client_servers import TINY, Script, begin, event, stream_words, usage
from PIL import Image

from penstock.client.bench import serve
from penstock.client.bench.datasets import DatasetError
from penstock.client.bench.flags import parser
from penstock.client.server import ServerError, unreachable
from testing.ports import free_ports

SMALL = ["--random-input-len", "20", "--random-output-len", "5"]


async def bench(url: str, *flags: str) -> int:
    """The command, in this event loop."""
    arguments = ["serve", "--base-url", url, "--tokenizer", str(TINY), *flags]
    return await serve.run(parser("").parse_args(arguments))


async def result(url: str, folder: Path, *flags: str, status: int = 0) -> dict[str, Any]:
    """What `--save-detailed` writes."""
    assert await bench(url, "--save-detailed", "--result-dir", str(folder), "--result-filename", "r.json", *flags) == status
    return json.loads((folder / "r.json").read_text())


async def test_every_token_of_every_request_is_counted(script: Script, tmp_path: Path) -> None:
    found = await result(script.url, tmp_path, "--num-prompts", "7", "--max-concurrency", "3", "--ignore-eos", *SMALL)
    assert (found["completed"], found["failed"], found["model"]) == (7, 0, "one")
    assert (found["total_input_tokens"], found["total_output_tokens"], found["total_cached_tokens"]) == (140, 35, 14)
    assert found["output_throughput"] == pytest.approx(35 / found["duration"])
    for one in found["requests"]:
        assert len(one["stamps"]) == len(one["tokens"]) and sum(one["tokens"]) == 5
        assert one["sent"] <= one["stamps"][0] <= one["stamps"][-1] <= found["duration"]
    assert len(script.bodies) == 8  # one to warm up
    body = script.bodies[1]
    assert (body["model"], body["stream"], body["stream_options"]) == ("one", True, {"include_usage": True})
    assert (body["max_tokens"], body["temperature"], body["ignore_eos"]) == (5, 0.0, True)
    assert {len(one["prompt"]) for one in script.bodies} == {20}
    assert script.bodies[0]["prompt"] != body["prompt"], "the first request would find itself in the cache"


async def test_the_same_seed_asks_the_same(script: Script) -> None:
    for seed in ("1", "1", "2"):
        assert await bench(script.url, "--num-prompts", "3", "--max-concurrency", "1", "--seed", seed, *SMALL) == 0
    asked = [[body["prompt"] for body in script.bodies[at : at + 4]] for at in (0, 4, 8)]
    assert asked[0] == asked[1] != asked[2]


async def test_chats_get_text_of_as_many_tokens(script: Script, tmp_path: Path) -> None:
    found = await result(f"{script.url}/v1/", tmp_path, "--endpoint", "/v1/chat/completions", "--num-prompts", "2", *SMALL)
    assert found["total_output_tokens"] == 10
    [message] = script.bodies[1]["messages"]
    assert message["role"] == "user" and isinstance(message["content"], str)
    assert script.bodies[1]["max_completion_tokens"] == 5 and "max_tokens" not in script.bodies[1]


async def test_chats_may_have_images_each_another_one(script: Script, tmp_path: Path) -> None:
    flags = ["--random-mm-base-items-per-request", "2", "--random-mm-image-size", "9x5", "--num-prompts", "2", *SMALL]
    await result(f"{script.url}/v1/", tmp_path, "--endpoint", "/v1/chat/completions", *flags)
    urls = [part["image_url"]["url"] for body in script.bodies for part in body["messages"][0]["content"][:2]]
    assert len(set(urls)) == 6  # the one to warm up has its own
    for url in urls:
        with Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,")))) as image:
            assert (image.format, image.mode, image.size) == ("PNG", "RGB", (9, 5))
            assert len(set(image.tobytes())) > 40
    assert script.bodies[0]["messages"][0]["content"][2]["type"] == "text"
    with pytest.raises(DatasetError, match="needs --endpoint /v1/chat/completions"):
        await bench(script.url, *flags)


async def test_headers_key_and_more_of_the_body_are_sent(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    body = '{"top_p": 0.5, "stream_options": {"continuous_usage_stats": true}}'
    flags = ["--header", "x-tenant=a=b", "--extra-body", body, "--model", "two", "--num-prompts", "1", *SMALL]
    assert await bench(script.url, *flags) == 0
    assert script.headers[1]["authorization"] == "Bearer secret" and script.headers[1]["x-tenant"] == "a=b"
    assert (script.bodies[1]["top_p"], script.bodies[1]["model"]) == (0.5, "two")
    assert script.bodies[1]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


async def test_each_kind_of_error_is_counted(script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def misbehave(script: Script, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        number = len(script.bodies)
        if number == 2:
            return web.json_response({"error": {"message": "too much to do"}}, status=503)
        if number in (3, 4, 5):
            response = await begin(request)
            await response.write(event(body, "w"))
            if number == 3:
                await response.write(b'data: {"error": {"message": "a GPU fell off"}}\n\n')
            elif number == 4:
                await response.write(b"data: what is this\n\n")
            return response  # the fifth just ends
        if number in (6, 7):  # one request: it is sent again when its connection breaks before the answer
            assert request.transport is not None
            request.transport.close()
        return await stream_words(script, request, body)

    script.answer = misbehave
    found = await result(script.url, tmp_path, "--num-prompts", "7", "--max-concurrency", "1", *SMALL, status=1)
    kinds = {"HTTP 503": 1, "error in the stream": 1, "protocol": 1, "cut off": 1, "connection": 1}
    assert found["errors_by_kind"] == kinds
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (2, 5, 10)
    shown = capsys.readouterr().out
    assert "too much to do" in shown and "a GPU fell off" in shown and "1 × cut off" in shown


async def test_a_request_that_went_into_a_closed_connection_is_sent_again(script: Script, tmp_path: Path) -> None:
    async def close(script: Script, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(script.bodies) == 3:
            assert request.transport is not None
            request.transport.close()
        return await stream_words(script, request, body)

    script.answer = close
    found = await result(script.url, tmp_path, "--num-prompts", "4", "--max-concurrency", "1", *SMALL)
    assert (found["completed"], found["failed"], len(script.bodies)) == (4, 0, 6)
    assert script.bodies[2] == script.bodies[3]


async def test_a_server_that_is_not_there_is_named() -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(ServerError, match=f"cannot reach {url}: connection refused"):
        await bench(url, "--num-prompts", "1")


async def test_an_address_without_http_is_no_broken_connection() -> None:
    with pytest.raises(ServerError, match="'localhost:8000' is not an address like http://localhost:8000"):
        await bench("localhost:8000", "--num-prompts", "1")


def test_a_failure_without_words_is_named() -> None:
    assert str(unreachable("http://host", ConnectionResetError())) == "the connection to http://host broke: ConnectionResetError"


async def test_where_the_result_goes_is_tried_before_anything_is_measured(script: Script, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match=r"the result cannot be written to .*file"):
        await bench(script.url, "--num-prompts", "3", *SMALL, "--save-result", "--result-dir", str(tmp_path / "file"))
    assert len(script.bodies) <= 1, "more than the warm-up was sent"


async def test_a_refusal_of_the_first_request_is_quoted(script: Script) -> None:
    async def refuse(_: Script, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "the context is 16 tokens"}}, status=400)

    script.answer = refuse
    with pytest.raises(ServerError, match="warm-up request failed: the server answered 400: the context is 16 tokens"):
        await bench(script.url, "--num-prompts", "5", *SMALL)
    assert len(script.bodies) == 1


async def test_it_waits_for_a_server_that_starts(script: Script) -> None:
    async def later(script: Script, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(script.bodies) == 1:
            return web.json_response({"error": {"message": "loading"}}, status=503)
        return await stream_words(script, request, body)

    script.answer = later
    assert await bench(script.url, "--num-prompts", "1", "--ready-check-timeout-sec", "30", *SMALL) == 0


async def test_an_interrupted_run_still_reports(script: Script, tmp_path: Path) -> None:
    waiting = asyncio.Event()

    async def slow(script: Script, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if len(script.bodies) < 4:
            return await stream_words(script, request, body)
        waiting.set()
        await asyncio.sleep(60)
        raise AssertionError

    script.answer = slow
    run = asyncio.create_task(result(script.url, tmp_path, "--num-prompts", "9", "--max-concurrency", "2", *SMALL))
    await asyncio.wait_for(waiting.wait(), 60)
    run.cancel()
    with pytest.raises(serve.Interrupted):
        await run
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["interrupted"], found["completed"], found["errors_by_kind"]) == (True, 2, {"interrupted": 2})


async def test_answers_without_usage_are_measured_and_that_is_said(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    async def silent(_: Script, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await response.write(event(body, "w") + event(body, "w", "stop"))
        return response

    script.answer = silent
    assert await bench(script.url, "--num-prompts", "2", *SMALL) == 0
    shown = capsys.readouterr().out
    assert "2 answers came without usage" in shown and "4 output" in shown


async def test_tokens_in_bunches_show_the_gaps_between_chunks(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    async def bunches(_: Script, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await begin(request)
        await response.write(event(body, "w "))
        await asyncio.sleep(0.02)
        await response.write(event(body, "w w w w", "length") + usage(20, 5) + b"data: [DONE]\n\n")
        return response

    script.answer = bunches
    assert await bench(script.url, "--num-prompts", "2", *SMALL) == 0
    assert "inter-chunk latency (icl)" in capsys.readouterr().out


async def test_goodput_price_and_percentiles_are_shown(
    script: Script, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    flags = ["--goodput", "ttft:0.0001", "tpot:60000", "--cost-per-hour", "2", "--num-devices", "4"]
    shape = ["--percentile-metrics", "e2el", "--metric-percentiles", "25,99.9", "--num-prompts", "2"]
    assert await bench(script.url, *flags, *shape, *SMALL) == 0
    shown = capsys.readouterr().out
    assert "(0 of 2)" in shown and "(4 devices)" in shown and "per million output tokens" in shown
    assert "p25" in shown and "p99.9" in shown and "ttft)" not in shown


@pytest.mark.parametrize("dataset", ["sharegpt", "trace"])
async def test_a_file_that_is_missing_or_too_short_is_named(script: Script, tmp_path: Path, dataset: str) -> None:
    with pytest.raises(DatasetError, match="needs --dataset-path"):
        await bench(script.url, "--dataset-name", dataset)
    path = tmp_path / "f.jsonl"
    talk = {"conversations": [{"from": "human", "value": "one two three four five"}] * 2}
    row = {"timestamp": 0, "input_length": 4, "output_length": 2}
    path.write_text(json.dumps([talk] if dataset == "sharegpt" else row))
    with pytest.raises(DatasetError, match="more than the 1 that"):
        await bench(script.url, "--dataset-name", dataset, "--dataset-path", str(path), "--num-prompts", "2")


async def test_a_trace_keeps_its_times(script: Script, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": at, "input_length": 9, "output_length": 2} for at in (0, 400, 1000)]
    path.write_text("\n".join(map(json.dumps, rows)))
    flags = ["--dataset-name", "trace", "--dataset-path", str(path), "--trace-speedup", "10"]
    found = (await result(script.url, tmp_path, *flags))["requests"]
    assert [one["due"] - found[0]["due"] for one in found] == pytest.approx([0, 0.04, 0.1])
    assert all(one["sent"] >= one["due"] for one in found)
    other = (await result(script.url, tmp_path, *flags, "--request-rate", "1000"))["requests"]
    assert other[2]["due"] - other[0]["due"] < 0.05


GAUGES = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3
vllm:num_requests_running{engine="1"} 4
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 5
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.97
"""


async def test_gauges_are_read_while_the_load_runs(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.client.bench.saturation.INTERVAL_S", 0.05)

    async def slow(script: Script, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        seen = script.scrapes
        async with asyncio.timeout(60):
            while len(script.bodies) > 1 and script.scrapes < seen + 8:
                await asyncio.sleep(0.01)
        return await stream_words(script, request, body)

    script.answer, script.metrics = slow, GAUGES
    found = await result(script.url, tmp_path, "--num-prompts", "1", *SMALL)
    saturation = found["saturation"]
    assert (saturation["mean_running"], saturation["mean_waiting"], saturation["peak_kv_usage"]) == (7, 5, 0.97)
    assert saturation["reading"] == "past the knee"


async def test_gauges_that_were_asked_for_must_be_there(script: Script) -> None:
    assert await bench(script.url, "--num-prompts", "1", *SMALL) == 0
    with pytest.raises(ServerError, match="no gauges of an engine"):
        await bench(script.url, "--num-prompts", "1", "--metrics-url", f"{script.url}/metrics")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--goodput", "itl:5"], "bounds none of"),
        (["--request-rate", "0"], "not above 0"),
        (["--burstiness", "inf"], "must be finite"),
        (["--extra-body", '{"n": 2}'], "n cannot be set here"),
        (["--extra-body", '{"stream_options": null}'], "stream_options must be an object"),
        (["--percentile-metrics", "ttft,foo"], "no metric 'foo'"),
        (["--metric-percentiles", "101"], "0 to 100"),
        (["--random-range-ratio", "1"], "not below 1"),
        (["--endpoint", "/v1/embeddings"], "neither"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parser("").parse_args(["serve", *flags])
    assert stop.value.code == 2 and message in capsys.readouterr().err
