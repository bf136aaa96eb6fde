"""What a real replica tells about itself: metrics that add up to what its clients saw, and timelines on request."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from frontend_process import Server, make_llama, serving
from prometheus_client.parser import text_string_to_metric_families

from testing import patient

TIMELINE = {"x-penstock-timeline": "true"}


@pytest.fixture(scope="module")
def server(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two sequences at a time, so that others wait; on an instruction set that nobody would choose."""
    llama = make_llama(tmp_path_factory.mktemp("llama"), tokenizer_files)
    flags = ("--max-num-seqs", "2", "--metrics-compat", "vllm", "--cpu-isa", "portable")
    with serving(llama, tmp_path_factory.mktemp("log") / "serve.log", *flags) as running:
        yield running


def scrape(server: Server) -> dict[tuple[str, ...], float]:
    """(name, values of the labels beyond the base) → value."""
    text = patient.get(f"{server.url}/metrics").text
    return {
        (sample.name, *(value for key, value in sample.labels.items() if key not in ("model_name", "engine"))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def complete(server: Server, prompt: list[int], headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "ignore_eos": True, "temperature": 0, **fields}
    response = patient.post(f"{server.url}/v1/completions", json=body, headers=headers)
    response.raise_for_status()
    return response


@pytest.mark.req("MET-01", "MET-02", "MET-06", "OB-10")
def test_counts_are_those_of_the_clients(server: Server):
    before = scrape(server)
    prompts = [[300 - at] * (20 + at) for at in range(8)]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda prompt: complete(server, prompt).json(), prompts))
    usages = [answer["usage"] for answer in answers]
    after = scrape(server)

    def rise(*key: str) -> float:
        return after[key] - before.get(key, 0.0)

    assert rise("penstock_generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages) == 160
    by_source = {source: rise("penstock_prompt_tokens_total", source) for source in ("computed", "local_cache")}
    assert sum(by_source.values()) == sum(usage["prompt_tokens"] for usage in usages) == sum(map(len, prompts))
    assert by_source["local_cache"] == sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert rise("penstock_time_to_first_token_seconds_count") == 8
    assert rise("penstock_inter_token_latency_seconds_count") == 8 * 19
    assert rise("penstock_request_success_total", "length") == 8
    assert rise("penstock_request_params_max_tokens_sum") == 160
    for name in ("queue", "prefill", "decode", "inference"):
        assert rise(f"penstock_request_{name}_time_seconds_count") == 8


@pytest.mark.req("MET-05")
def test_the_time_in_the_queue_is_that_of_those_who_must_wait(server: Server):
    """Twelve sequences come at once and two run at a time: on average they wait for five in two to end, and run once."""
    before = scrape(server)
    complete(server, [90] * 30, n=12)
    after = scrape(server)
    queue, inference = (
        after[key,] - before[key,]
        for key in ("penstock_request_queue_time_seconds_sum", "penstock_request_inference_time_seconds_sum")
    )
    assert queue > inference


def test_the_steps_cost_what_the_models_shape_says(server: Server):
    """Two layers of hidden size 64, 4 heads of 16, 2 KV heads, an MLP of 96 and 320 logits."""
    before = scrape(server)
    complete(server, [7, 8, 9, 10, 11], max_tokens=2)
    deadline = time.monotonic() + 60
    while (after := scrape(server))["penstock_step_tokens_sum",] - before["penstock_step_tokens_sum",] < 6:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    linear = 2 * 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96)
    key = "penstock_estimated_flops_total"
    assert after[key, "linear"] - before[key, "linear"] == 6 * linear
    assert after[key, "attention"] - before[key, "attention"] == 4 * 64 * 2 * (1 + 2 + 3 + 4 + 5 + 6)
    assert after[key, "lm_head"] - before[key, "lm_head"] == 2 * 2 * 64 * 320
    assert after["penstock_sampled_tokens_total",] - before["penstock_sampled_tokens_total",] == 2


def test_which_kernels_run_is_told(server: Server):
    told = patient.get(f"{server.url}/version").json()
    kernels = told["kernels"]
    assert kernels in ("native portable", "reference") and told["quantization"] == "none"
    text = patient.get(f"{server.url}/metrics").text
    (info,) = [line for line in text.splitlines() if line.startswith("penstock_engine_info{")]
    assert f'kernels="{kernels}"' in info and 'dtype="float32"' in info and 'quantization="none"' in info
    assert "vllm:cache_config_info{" in text and "vllm:num_requests_running{" in text


@pytest.mark.req("LD-03")
def test_what_the_start_was_spent_on_is_told_and_logged(server: Server):
    told = {key[1]: value for key, value in scrape(server).items() if key[0] == "penstock_load_seconds"}
    assert list(told) == ["bandwidth", "imports", "weights", "memory", "cache", "warm_up", "adapters"]
    assert told["weights"] > 0 and told["warm_up"] > 0
    (line,) = [line for line in server.log.read_text().splitlines() if "ready after" in line]
    assert ", ".join(f"{part} {seconds:.1f}" for part, seconds in told.items()) in line


@pytest.mark.req("OB-03")
@pytest.mark.parametrize("stream", [False, True])
def test_a_timeline_comes_with_the_answer_on_request(server: Server, stream: bool):
    prompt = [5 + stream] * 40
    for cached in (0, 32):
        told = timeline_of(complete(server, prompt, TIMELINE, n=2, stream=stream), stream)
        assert [one["index"] for one in told] == [0, 1]
        first = told[0]
        assert (first["prompt_tokens"], first["completion_tokens"], first["finish_reason"]) == (40, 20, "length")
        assert first["cached_tokens"] == cached
        assert [event["event"] for event in first["events"]] == ["arrived", "queued", "scheduled", "first_token", "last_token"]
        stamps = [event["ms"] for event in first["events"]]
        assert stamps == sorted(stamps) and stamps[0] == 0


def timeline_of(response: httpx.Response, stream: bool) -> list[dict[str, Any]]:
    if not stream:
        return response.json()["timeline"]
    events = response.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    return json.loads(events[-2].removeprefix("data: "))["timeline"]


def test_nobody_is_told_who_did_not_ask(server: Server):
    assert "timeline" not in complete(server, [1, 2]).json()
    assert "timeline" not in complete(server, [1, 2], stream=True).text
    body = {"model": "tiny", "prompt": [1]}
    response = patient.post(f"{server.url}/v1/completions", json=body, headers={"x-penstock-timeline": "yes"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-penstock-timeline")
