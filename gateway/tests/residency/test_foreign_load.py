"""The load of engines that are not ours: pages of vLLM, SGLang and TensorRT-LLM, ORCA headers of any dialect, and the poller."""

import asyncio
import contextlib
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.api import load_report
from penstock.api.fleet import Engine, Fleet, Model, Pool, Replica
from penstock.gateway.load.foreign import ForeignLoad, engine_of, from_orca
from penstock.gateway.load.pages import largest, samples, total
from penstock.gateway.load.poller import LoadPoller
from penstock.gateway.load.replica_client import ReplicaClient
from penstock.gateway.picker.candidates import ReplicaKey, key_of
from penstock.gateway.picker.request import Prompt, RequestView
from penstock.gateway.picker.state import FleetState

FILLER = "".join(
    f"# HELP vllm:filler_{n} Something.\n# TYPE vllm:filler_{n} histogram\n"
    + "".join(f'vllm:filler_{n}_bucket{{engine="0",le="{bound}",model_name="m"}} {bound}.0\n' for bound in range(12))
    for n in range(30)
)
VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 99.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="1000",num_cpu_blocks="None"} 1.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="1",num_gpu_blocks="1000",num_cpu_blocks="None"} 1.0
vllm:lora_requests_info{max_lora="4",running_lora_adapters="old",waiting_lora_adapters=""} 1.7e9
vllm:lora_requests_info{max_lora="4",running_lora_adapters="sql,chat",waiting_lora_adapters="code"} 1.8e9
vllm:prompt_tokens_total{engine="0",model_name="m"} %(prompt)s
vllm:generation_tokens_total{engine="0",model_name="m"} %(generation)s
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} %(itl_s)s
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} %(itl_n)s
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} %(prefill)s
vllm:request_prompt_tokens_sum{engine="0",model_name="m"} %(ended)s
vllm:request_prompt_tokens_count{engine="0",model_name="m"} 5.0
"""
FIRST = {"prompt": 1000, "generation": 100, "itl_s": 1.0, "itl_n": 100, "prefill": 2.0, "ended": 500}
LATER = {"prompt": 3000, "generation": 300, "itl_s": 5.0, "itl_n": 300, "prefill": 2.5, "ended": 2500}


def page(figures: dict[str, float] = FIRST, started: float | None = 1000.0) -> bytes:
    process = f"process_start_time_seconds {started}\n" if started is not None else ""
    return (FILLER + VLLM % figures + process).encode()


@pytest.mark.req("RT-01", "RT-02", "RT-03", "RT-12", "RT-13", "RT-18")
def test_a_page_of_vllms_becomes_a_report() -> None:
    report, traits = ForeignLoad("vllm").read(page(), 10.0)
    assert (report.num_requests_running, report.waiting, report.kv_cache_usage_perc) == (7, 2, 0.5)
    assert (traits.engine, traits.block_size, traits.num_blocks) == ("vllm", 32, 2000)
    assert (report.kv_blocks_total, report.kv_blocks_reclaimable) == (2000, 1000)
    assert report.prefill_backlog_tokens == 200
    assert (report.lora_slots, report.lora_slots_free) == (4, 2)
    assert (set(report.lora_running), set(report.lora_waiting)) == ({"sql", "chat"}, {"code"})


def test_rates_are_how_counters_move_and_stand_while_they_do_not() -> None:
    load = ForeignLoad("vllm")
    first, _ = load.read(page(), 10.0)
    assert (first.decode_step_s, first.prefill_tokens_per_s, first.prompt_tokens_per_s) == (0, 0, 0)
    second, _ = load.read(page(LATER), 12.0)
    assert second.decode_step_s == pytest.approx(0.02)
    assert second.prefill_tokens_per_s == pytest.approx(4000)
    assert (second.prompt_tokens_per_s, second.generation_tokens_per_s) == (1000, 100)
    third, _ = load.read(page(LATER), 14.0)
    assert (third.decode_step_s, third.prefill_tokens_per_s) == (second.decode_step_s, second.prefill_tokens_per_s)
    assert third.prompt_tokens_per_s == 0
    assert [r.seq for r in (first, second, third)] == [1, 2, 3]


def test_llama_cpps_counters_become_rates() -> None:
    text = "llamacpp:prompt_tokens_total %d\nllamacpp:prompt_seconds_total %g\n"
    text += "llamacpp:tokens_predicted_total %d\nllamacpp:tokens_predicted_seconds_total %g\n"
    load = ForeignLoad("llamacpp")
    load.read((text % (100, 1.0, 50, 1.0)).encode(), 0.0)
    report, _ = load.read((text % (300, 1.5, 150, 3.0)).encode(), 2.0)
    assert (report.prefill_tokens_per_s, report.decode_step_s) == (400, 0.02)
    assert (report.prompt_tokens_per_s, report.generation_tokens_per_s) == (100, 50)


def test_the_speed_of_prefill_is_that_of_the_requests_that_ended() -> None:
    """vLLM counts a prompt as its request begins and the time that it took as it ends: an answer of seconds lies between."""
    load = ForeignLoad("vllm")
    load.read(page(), 0.0)
    begun, _ = load.read(page(FIRST | {"prompt": 3000}), 2.0)
    ended, _ = load.read(page(FIRST | {"prompt": 3000, "ended": 2500, "prefill": 2.5}), 4.0)
    others, _ = load.read(page(FIRST | {"prompt": 9000, "ended": 2600, "prefill": 2.6}), 6.0)
    assert [it.prefill_tokens_per_s for it in (begun, ended, others)] == [0, 4000, pytest.approx(1000)]
    old = page().replace(b"vllm:request_prefill_time", b"vllm:nothing")
    computed = b"vllm:request_prefill_kv_computed_tokens_sum %d\nvllm:request_prefill_time_seconds_sum %d\n"
    newer = ForeignLoad("vllm")
    newer.read(old + computed % (100, 1), 0.0)
    assert newer.read(old + computed % (400, 2), 2.0)[0].prefill_tokens_per_s == 300


@pytest.mark.parametrize("started", [(1000.0, 2000.0), (None, None)])
def test_a_restart_is_a_new_epoch(started: tuple[float | None, float | None]) -> None:
    load = ForeignLoad("vllm")
    before, _ = load.read(page(LATER, started[0]), 10.0)
    after, _ = load.read(page(FIRST, started[1]), 12.0)
    assert after.epoch > before.epoch
    assert after.prompt_tokens_per_s == 0


@pytest.mark.parametrize(
    ("engine", "text", "expected"),
    [
        (
            "sglang",
            'sglang:num_running_reqs{model_name="m"} 5\nsglang:num_queue_reqs{model_name="m"} 1\nsglang:token_usage{m="m"} 0.3\n'
            'sglang:cache_config_info{page_size="64",num_pages="100"} 1\n',
            (5, 1, 0.3, 64, 100),
        ),
        (
            "sglang",  # 0.5.23, which has no cache_config_info
            'sglang:num_running_reqs{tp_rank="0"} 5\nsglang:num_queue_reqs{tp_rank="0"} 1\nsglang:token_usage{tp_rank="0"} 0.3\n'
            'sglang:page_size{tp_rank="0"} 1\nsglang:num_pages{tp_rank="0"} 9000\n',
            (5, 1, 0.3, 1, 9000),
        ),
        (
            "trtllm",
            "trtllm_num_requests_running 5\ntrtllm_num_requests_waiting 1\ntrtllm_kv_cache_utilization 0.3\n"
            "trtllm_kv_cache_tokens_per_block 64\ntrtllm_kv_cache_max_blocks 100\n",
            (5, 1, 0.3, 64, 100),
        ),
        ("llamacpp", "llamacpp:requests_processing 5\nllamacpp:requests_deferred 1\n", (5, 1, 0.0, 16, 0)),
        ("vllm", "vllm:num_requests_running 5\nvllm:gpu_cache_usage_perc 0.3\n", (5, 0, 0.3, 16, 0)),
    ],
)
def test_other_engines_and_older_names(engine: Engine, text: str, expected: tuple[Any, ...]) -> None:
    assert engine_of(("# HELP x y\n" + text).encode()) == engine
    report, traits = ForeignLoad(engine).read(text.encode(), 0.0)
    seen = (report.num_requests_running, report.waiting, report.kv_cache_usage_perc, traits.block_size, traits.num_blocks)
    assert seen == expected


def test_who_wrote_a_page() -> None:
    assert engine_of(b"penstock_num_requests_running 1\nvllm:num_requests_running 1\n") == "penstock"
    assert engine_of(b"# HELP vllm: mentioned\nother 1\n") is None


def test_lines_are_found_whole_and_broken_ones_left_out() -> None:
    text = b'x_y 1\na{l="b}c\\"d",e="f"} 2 1700000000\na 3\nnot_a 9\na_b 9\na{} oops\na{\na nan\n# a 9\na 4'
    assert [sample.value for sample in samples(text, "a")] == [2, 3, 4]
    assert samples(text, "a")[0].label("l") == 'b}c\\"d'
    assert (total(text, "missing", "a"), largest(text, "a"), total(text, "", "missing")) == (9, 4, None)


@settings(max_examples=30)
@given(st.binary(max_size=200), st.sampled_from(["vllm", "sglang", "trtllm", "llamacpp"]))
def test_no_page_breaks_the_reader(noise: bytes, engine: Engine) -> None:
    for text in (noise, page()[:-50] + noise, b"vllm:num_requests_running{" + noise, b"vllm:kv_cache_usage_perc " + noise):
        ForeignLoad(engine).read(text, 1.0)


# --- ORCA ---


@pytest.mark.req("RT-05")
@pytest.mark.parametrize(
    "header",
    [
        "TEXT named_metrics.kv_cache_usage_perc=0.42, named_metrics.num_requests_waiting=3.0",
        "text named_metrics.kv_cache_usage_perc=0.42;named_metrics.num_requests_waiting=3;cpu_utilization=0.1",
        "named_metrics.KV_Cache_Usage_Perc:0.42,named_metrics.num_requests_waiting:3",
        'JSON {"named_metrics": {"kv_cache_usage_perc": 0.42, "num_requests_waiting": 3.0}, "unheard_of": 1}',
        '{"named_metrics": {"vllm:kv_cache_usage_perc": 0.42, "vllm:num_requests_waiting": 3.0}}',
        "TEXT named_metrics.vllm:kv_cache_usage_perc:0.42, named_metrics.vllm:num_requests_waiting:3",
        "TEXT named_metrics.vllm:gpu_cache_usage_perc=0.42, named_metrics.vllm:num_requests_waiting=3",
        'JSON {"named_metrics": {"sglang:token_usage": 0.42, "sglang:num_queue_reqs": 3, "sglang:num_running_reqs": 7}}',
        'JSON {"named_metrics": {"kv_cache_utilization": 0.42, "num_requests_waiting": 3}}',
    ],
)
def test_orca_of_any_dialect_changes_what_it_names(header: str) -> None:
    last, _ = ForeignLoad("vllm").read(page(), 10.0)
    report = from_orca(last, load_report.decode_metrics(header))
    assert report is not None
    assert (report.kv_cache_usage_perc, report.waiting, report.num_requests_running) == (0.42, 3, 7)
    assert report.kv_blocks_reclaimable == 1160
    assert (report.epoch, report.seq) == (last.epoch, last.seq)


def test_orca_alone_is_a_report_and_nothing_of_use_is_none() -> None:
    report = from_orca(None, {"kv_cache_usage_perc": 2.0})
    assert report is not None
    assert report.kv_cache_usage_perc == 1.0
    assert from_orca(None, {"cpu_utilization": 0.5}) is None


# --- the poller ---


class World:
    """One replica and a poller that looks at it all the time."""

    def __init__(self, engine: Engine, pages: dict[str, bytes]) -> None:
        self.state = FleetState()
        self.engine: Engine = engine
        self.pages = pages
        self.asked: list[str] = []
        self.learned: list[ReplicaKey] = []

    async def run(self, seconds: float, period_s: float = 0.05) -> None:
        async def answer(request: web.Request) -> web.Response:
            self.asked.append(request.path)
            body = self.pages.get(request.path)
            return web.Response(body=body) if body is not None else web.Response(status=404)

        app = web.Application()
        app.router.add_get("/{path}", answer)
        async with contextlib.AsyncExitStack() as stack:
            runner = web.AppRunner(app)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            known: dict[str, Any] = {"uid": "u", "name": "r", "pool": "p", "host": "127.0.0.1", "ready": True}
            replica = Replica(**known, port=runner.addresses[0][1], events_port=0, replay_port=0, engine=self.engine)
            self.key = key_of(replica)
            model = Model(id="ns/m", served_names=["m"])
            self.state.update(Fleet(models=[model], pools=[Pool(id="p", model="ns/m")], replicas=[replica]))
            poller = LoadPoller(self.state, self.learned.append, period_s)
            session = await stack.enter_async_context(aiohttp.ClientSession())
            task = asyncio.create_task(poller.run(ReplicaClient(session)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while self.state.reports.get(self.key) is None:
                        await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.mark.req("RT-13")
@pytest.mark.parametrize("engine", ["vllm", "auto"])
async def test_a_foreign_replica_is_looked_at_and_known_by_its_page(engine: Engine) -> None:
    world = World(engine, {"/metrics": page()})
    await world.run(60)
    heard = world.state.reports.get(world.key)
    assert heard is not None
    assert heard.report.num_requests_running == 7
    assert world.state.engine(world.key) == "vllm"
    assert world.state.traits(world.key).block_size == 32
    assert world.learned == [world.key]
    assert set(world.asked) == {"/metrics"}
    # Its blocks bound what is predicted of it.
    prompt = Prompt(5000, tuple(n.to_bytes(32, "big") for n in range(5000)))
    request = RequestView(id="r", path="", model="m", prompts=(prompt,))
    world.state.routed(world.state.directory.fleet.models[0], request, world.key, 0, 0.0)
    assert world.state.residency.blocks(world.key) <= 2000


async def test_a_replica_of_ours_is_found_out_and_then_asked_its_own_way() -> None:
    body = b'{"type":"LoadReport","epoch":5,"seq":1,"num_requests_running":2}'
    world = World("auto", {"/metrics": b"penstock_num_requests_running 2\n", "/load": body})
    await world.run(60)
    heard = world.state.reports.get(world.key)
    assert heard is not None
    assert (heard.report.epoch, heard.report.num_requests_running) == (5, 2)
    assert world.asked[:2] == ["/metrics", "/load"]


async def test_with_polling_off_nobody_is_asked() -> None:
    world = World("vllm", {"/metrics": page()})
    await world.run(0.4, period_s=0)
    assert world.asked == []
