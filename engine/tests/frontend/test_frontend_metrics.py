"""What the frontend counts: spans of a request's life, tokens by source, sums over processes and engines, and their names."""

import re
from typing import Any

import msgspec
import numpy as np
import pytest
from frontend_fakes import step_frame
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from penstock.api import metrics as names
from penstock.api.load_report import LoadReport
from penstock.engine.cost import StepCost
from penstock.engine.frontend.detokenizer import Detokenizer
from penstock.engine.frontend.egress import Egress
from penstock.engine.frontend.generation import Choice, Generation
from penstock.engine.frontend.observe.metrics import EngineMetrics, Metrics
from penstock.engine.frontend.observe.timeline import intervals, timeline
from penstock.engine.frontend.vocabulary import Vocabulary
from penstock.engine.messages import Finished, FinishReason, Lifecycle, LifecycleEvent, Started
from penstock.engine.stats import Buckets, CoreStats, EncoderStats, ExpertStats, OffloadStats, StepStats, TierStats

QUEUED, SCHEDULED, PREEMPTED = LifecycleEvent.QUEUED, LifecycleEvent.SCHEDULED, LifecycleEvent.PREEMPTED


def lifecycle(*turns: tuple[int, LifecycleEvent, float]) -> Lifecycle:
    indexes, events, times = zip(*turns, strict=True)
    return Lifecycle(np.array(indexes, "<i8").tobytes(), bytes(events), np.array(times, "<f8").tobytes())


def scrape(*engines: EngineMetrics) -> dict[str, Any]:
    """Name of a sample and its labels beyond the base → value."""
    text = generate_latest(Metrics(engines).registry()).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine")}
            found[" ".join([sample.name, *(f"{key}={value}" for key, value in labels.items())])] = sample.value
    return found


def stats(running: int = 0, usage: float = 0.0, **more: int) -> CoreStats:
    report = LoadReport(
        epoch=1, seq=1, num_requests_running=running, max_num_seqs=8, kv_blocks_total=8, kv_cache_usage_perc=usage
    )
    return CoreStats(report, steps=1, preemptions=0, prefix_queries=more.get("queries", 0), prefix_hits=more.get("hits", 0))


async def one_life(tokenizer: Tokenizer, metrics: EngineMetrics) -> Generation:
    """Arrived at 99.5, queued at 100, scheduled at 101, first token at 103, preempted at 104, again at 106, last token at 107."""
    egress = Egress(metrics)
    choice = Choice(5, 0, 40, Detokenizer(Vocabulary(tokenizer), []), (), frozenset(), None)
    generation = Generation([choice], 1, stream=False, arrival=99.5)
    egress.add(generation)
    first = step_frame({5: [70]}, started=[Started(5, 32)], time=103.0)
    await egress.process(with_turns(first, (5, QUEUED, 100.0), (5, SCHEDULED, 101.0)))
    await egress.process(with_turns(step_frame({}, time=104.0), (5, PREEMPTED, 104.0)))
    last = step_frame({5: [71]}, [Finished(5, FinishReason.LENGTH)], time=107.0)
    await egress.process(with_turns(last, (5, SCHEDULED, 106.0)))
    return generation


def with_turns(frame: Any, *turns: tuple[int, LifecycleEvent, float]) -> Any:
    return msgspec.structs.replace(frame, lifecycle=lifecycle(*turns))


@pytest.mark.req("MET-05", "OB-04", "OB-25")
async def test_queue_prefill_and_decode_add_up_and_a_preemption_lengthens_the_span_it_falls_into(byte_level: Tokenizer):
    metrics = EngineMetrics()
    generation = await one_life(byte_level, metrics)
    spans = intervals(generation.choices[0])
    assert spans is not None and tuple(spans) == (1.0, 2.0, 4.0)
    found = scrape(metrics)
    assert found["penstock_request_queue_time_seconds_sum"] == 1.0
    assert found["penstock_request_prefill_time_seconds_sum"] == 2.0
    assert found["penstock_request_decode_time_seconds_sum"] == 4.0
    assert found["penstock_request_inference_time_seconds_sum"] == 6.0
    assert found["penstock_e2e_request_latency_seconds_sum"] == 7.5
    assert found["penstock_time_to_first_token_seconds_sum"] == 3.5
    assert found["penstock_request_prompt_tokens_sum"] == 40 and found["penstock_request_generation_tokens_sum"] == 2


async def test_a_timeline_tells_every_turn_in_order(byte_level: Tokenizer):
    (told,) = timeline(await one_life(byte_level, EngineMetrics()))
    assert (told["cached_tokens"], told["prompt_tokens"], told["completion_tokens"]) == (32, 40, 2)
    assert told["finish_reason"] == "length"
    assert [(event["event"], event["ms"]) for event in told["events"]] == [
        ("arrived", 0.0),
        ("queued", 500.0),
        ("scheduled", 1500.0),
        ("first_token", 3500.0),
        ("preempted", 4500.0),
        ("scheduled", 6500.0),
        ("last_token", 7500.0),
    ]
    assert told["events"][1]["time"] == 100.0
    assert told["runs"] == []


async def test_a_timeline_shows_the_tokens_that_came_in_one_step_as_far_as_the_client_has_them(byte_level: Tokenizer):
    """A stop string cuts inside the second run."""
    egress, stop = Egress(EngineMetrics()), byte_level.decode([85])
    choice = Choice(5, 0, 40, Detokenizer(Vocabulary(byte_level), []), (stop,), frozenset(), None)
    generation = Generation([choice], 1, stream=False, arrival=100.0)
    egress.add(generation)
    await egress.process(step_frame({5: [70]}, started=[Started(5, 0)], time=101.0))
    await egress.process(step_frame({5: [71, 72, 73]}, time=102.0))
    await egress.process(step_frame({5: [74]}, time=103.0))
    await egress.process(step_frame({5: [75, 85, 76, 77]}, time=104.0))
    (told,) = timeline(generation)
    assert told["completion_tokens"] == 7
    assert told["runs"] == [{"first": 1, "tokens": 3, "ms": 2000.0}, {"first": 5, "tokens": 2, "ms": 4000.0}]


@pytest.mark.req("MET-06")
async def test_prompt_tokens_by_source_are_all_prompt_tokens(byte_level: Tokenizer):
    metrics = EngineMetrics()
    await one_life(byte_level, metrics)
    found = scrape(metrics)
    assert found["penstock_prompt_tokens_total source=local_cache"] == 32
    assert found["penstock_prompt_tokens_total source=computed"] == 8
    assert found["penstock_generation_tokens_total"] == 2


@pytest.mark.req("MET-07")
def test_two_engines_have_a_label_each_and_every_family_once():
    engines = [EngineMetrics("m", engine=at) for at in (0, 1)]
    for at, engine in enumerate(engines):
        engine.stats = stats(running=3 + at, usage=0.25 * at)
        engine.generation_tokens.add(10 * at)
    text = generate_latest(Metrics(engines).registry()).decode()
    assert text.count(f"# TYPE {names.NUM_REQUESTS_RUNNING} gauge") == 1
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in (names.NUM_REQUESTS_RUNNING, names.KV_CACHE_USAGE, names.GENERATION_TOKENS):
        values = {sample.labels["engine"]: sample.value for sample in families[name].samples}
        expected = {names.NUM_REQUESTS_RUNNING: (3, 4), names.KV_CACHE_USAGE: (0, 0.25), names.GENERATION_TOKENS: (0, 10)}
        assert (values["0"], values["1"]) == expected[name]
    assert all(sample.labels["model_name"] == "m" for family in families.values() for sample in family.samples)


@pytest.mark.req("OB-17")
def test_processes_that_share_a_table_tell_its_sum():
    first, second = EngineMetrics("m"), EngineMetrics("m")
    first.generation_tokens.add(5)
    rows = np.zeros((2, first.table.size))
    for number, metrics in enumerate((first, second)):
        metrics.table.share(rows, number)
    second.generation_tokens.add(7)
    second.ttft.observe(0.3)
    first.ttft.observe(0.02)
    for metrics in (first, second):
        found = scrape(metrics)
        assert found["penstock_generation_tokens_total"] == 12
        assert found["penstock_time_to_first_token_seconds_count"] == 2
        assert found["penstock_time_to_first_token_seconds_bucket le=0.02"] == 1
    successor = EngineMetrics("m")
    successor.table.share(rows, 1)
    assert scrape(successor)["penstock_generation_tokens_total"] == 12, "a process that begins anew loses no counts"


def test_a_bucket_holds_values_up_to_its_bound_one_at_a_time_or_many():
    one, many = EngineMetrics(), EngineMetrics()
    for value, times in {0.0005: 1, 0.001: 3, 0.0011: 1, 3000.0: 2, 0.25: 1}.items():
        for _ in range(times):
            one.ttft.observe(value)
        many.ttft.observe(value, times)
    assert scrape(one) == pytest.approx(scrape(many))
    assert scrape(many)["penstock_time_to_first_token_seconds_bucket le=0.001"] == 4
    assert scrape(many)["penstock_time_to_first_token_seconds_bucket le=+Inf"] == 8


@pytest.mark.req("MET-01", "OB-02")
def test_the_buckets_of_the_first_tokens_time_are_the_fields():
    bounds = [key.partition("le=")[2] for key in scrape(EngineMetrics()) if key.startswith(f"{names.TIME_TO_FIRST_TOKEN}_bucket")]
    fields = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
    assert tuple(float(bound) for bound in bounds[:-1]) == fields


@pytest.mark.req("OB-01")
def test_names_follow_the_rules_of_prometheus():
    """Base units, counters that end in _total, nothing that ends as a histogram's samples do; each with a help text."""
    engine = EngineMetrics("m")
    engine.stats = stats()
    families = list(Metrics([engine]).collect())
    for family in families:
        assert re.fullmatch(r"penstock_[a-z][a-z0-9_]*", family.name)
        assert family.documentation.endswith(".")
        assert not re.search(r"_(count|sum|bucket|total|info_total|milliseconds|ms|minutes|percent|kb|mb)$", family.name)
        if family.type == "counter":
            assert {sample.name for sample in family.samples} == {f"{family.name}_total"}
    assert len({family.name for family in families}) == len(families)


def test_what_the_cores_steps_were_is_told():
    metrics = EngineMetrics("m")
    seconds, tokens = Buckets([0, 3] + [0] * 22 + [1], 40.0), Buckets([2, 2] + [0] * 12, 20.0)
    cost = StepCost(1e9, 2e8, 3e8, weight_bytes=5e6, kv_read_bytes=4e5, kv_write_bytes=1e4)
    metrics.stats = msgspec.structs.replace(stats(), step=StepStats(seconds, tokens, sampled_tokens=9, not_finite=1, cost=cost))
    found = scrape(metrics)
    assert found["penstock_step_seconds_bucket le=0.00025"] == 3 and found["penstock_step_seconds_bucket le=30.0"] == 3
    assert found["penstock_step_seconds_count"] == 4 and found["penstock_step_seconds_sum"] == 40
    assert found["penstock_step_tokens_bucket le=1.0"] == 2 and found["penstock_step_tokens_sum"] == 20
    assert found["penstock_sampled_tokens_total"] == 9 and found["penstock_corrupted_requests_total"] == 1
    assert found["penstock_estimated_flops_total part=attention"] == 2e8
    assert found["penstock_estimated_read_bytes_total part=weights"] == 5e6
    assert found["penstock_estimated_write_bytes_total"] == 1e4


@pytest.mark.req("KO-32")
def test_what_the_hosts_memory_keeps_is_told_where_it_keeps_anything():
    engine = EngineMetrics("m", engine=0)
    engine.stats = stats()
    assert not any("offload" in name or "external" in name for name in scrape(engine))
    disk = TierStats(20, 9, 700, 70, 1.5, 0.5, 3, 1, 32)
    offload = OffloadStats(TierStats(10, 4, 800, 300, 0.5, 0.25, 2, 1), {"disk": disk}, 64, 48)
    engine.stats = msgspec.structs.replace(stats(), offload=offload)
    found = scrape(engine)
    assert found["penstock_external_prefix_cache_queries_total"] == 64
    assert found["penstock_external_prefix_cache_hits_total"] == 48
    moved = {kind: found[f"penstock_kv_offload_bytes_total tier=memory transfer_type={kind}"] for kind in ("store", "load")}
    assert moved == {"store": 800, "load": 300}
    assert found["penstock_kv_offload_seconds_total tier=memory transfer_type=load"] == 0.25
    assert found["penstock_kv_offload_bytes_total tier=disk transfer_type=store"] == 700
    assert found["penstock_kv_offload_pages state=used tier=memory"] == 4
    assert found["penstock_kv_offload_pages state=free tier=disk"] == 11
    assert found["penstock_kv_offload_lost_pages_total reason=evicted tier=memory"] == 2
    assert [found[f"penstock_kv_offload_declined_tokens_total tier={tier}"] for tier in ("memory", "disk")] == [0, 32]
    text = generate_latest(Metrics([engine], vllm_names=True).registry()).decode()
    assert "vllm:external_prefix_cache_hits_total" in text


@pytest.mark.req("MM-25")
def test_what_became_of_images_is_told_where_there_can_be_any():
    engine = EngineMetrics("m", engine=0)
    engine.stats = stats()
    assert not any("encoder" in name for name in scrape(engine))
    engine.stats = msgspec.structs.replace(stats(), encoder=EncoderStats(3, 2, 75, 0.5, 100, 75, 25, 4))
    found = scrape(engine)
    assert (found["penstock_encoder_images_total result=encoded"], found["penstock_encoder_images_total result=cached"]) == (3, 2)
    assert (found["penstock_encoder_tokens_total"], found["penstock_encoder_seconds_total"]) == (75, 0.5)
    kept = [found[f"penstock_encoder_cache_tokens state={state}"] for state in ("held", "idle", "free")]
    assert kept == [25, 50, 25] and found["penstock_encoder_waiting_images"] == 4


@pytest.mark.req("DX-16")
def test_what_experts_have_to_do_is_told_where_they_move():
    engine = EngineMetrics("m", engine=0)
    engine.stats = stats()
    assert not any("expert" in name for name in scrape(engine))
    engine.stats = msgspec.structs.replace(stats(), experts=ExpertStats([40, 10], 0.625, 3, 700))
    found = scrape(engine)
    assert [found[f"penstock_expert_tokens_total ep_rank={rank}"] for rank in (0, 1)] == [40, 10]
    assert found["penstock_expert_balancedness"] == 0.625
    assert (found["penstock_expert_rebalances_total"], found["penstock_expert_moved_bytes_total"]) == (3, 700)


@pytest.mark.req("MET-04")
def test_all_of_it_is_told_under_vllms_names_on_request():
    engine = EngineMetrics("m", engine=3)
    engine.stats = stats(running=2, queries=30, hits=10)
    engine.prompt_tokens.add(4, "local_cache")
    engine.prompt_tokens.add(6, "computed")
    engine.finished.add(1, "length")
    engine.describe(names.CACHE_CONFIG_INFO, "The KV cache.", block_size="16")
    assert not any(family.name.startswith("vllm:") for family in Metrics([engine]).collect())
    text = generate_latest(Metrics([engine], vllm_names=True).registry()).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    wanted = "num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc prefix_cache_queries "
    wanted += "prefix_cache_hits num_preemptions prompt_tokens prompt_tokens_by_source generation_tokens request_success "
    wanted += "time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds "
    wanted += "e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds cache_config_info"
    assert {f"vllm:{name}" for name in wanted.split()} <= set(families)
    assert all(sample.labels["engine"] == "3" for family in families.values() for sample in family.samples)
    values = {(sample.name, *sorted(sample.labels.values())): sample.value for f in families.values() for sample in f.samples}
    assert values["vllm:prompt_tokens_total", "3", "m"] == 10
    assert values["vllm:prompt_tokens_by_source_total", "3", "local_cache_hit", "m"] == 4
    assert values["vllm:request_success_total", "3", "length", "m"] == 1
    assert values["vllm:prefix_cache_hits_total", "3", "m"] == 10
    assert values["vllm:num_requests_waiting", "3", "m"] == 0
    assert families["vllm:time_to_first_token_seconds"].type == "histogram"
