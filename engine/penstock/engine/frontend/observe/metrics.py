"""The engine's Prometheus metrics: what a frontend counts, and what the core's newest report says."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from penstock.api import metrics as names
from penstock.api.load_report import WAITING_REASONS
from penstock.engine.core.measure import step_meter
from penstock.engine.core.plan import GraphReport
from penstock.engine.core.scheduling import waits
from penstock.engine.cost import StepCost
from penstock.engine.frontend.generation import Choice, Generation
from penstock.engine.frontend.observe.series import Family, SeriesTable, histogram_family
from penstock.engine.frontend.observe.timeline import intervals
from penstock.engine.frontend.observe.vllm_names import vllm_families
from penstock.engine.messages import FINISH_REASONS
from penstock.engine.sampling import SamplingParams
from penstock.engine.stats import (
    Buckets,
    CoreStats,
    DraftStats,
    EncoderStats,
    ExpertStats,
    GraphSteps,
    OffloadStats,
    TierStats,
    TransferStats,
)

# Seconds. Coarse enough for a large model on a busy device, fine enough for a small one on a CPU.
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST = (
    *(0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
_TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
_CHOICES = (1, 2, 5, 10, 20, 50, 100)

SOURCES = ("computed", "local_cache")
"""Sources of a prompt token's KV."""


class EngineMetrics:
    """Metrics of one core, as one frontend sees it.

    Args:
        model: The name that the model is served by.
        engine: The core's number.
    """

    def __init__(self, model: str = "", engine: int = 0) -> None:
        self.stats: CoreStats | None = None
        self.table = table = SeriesTable()
        self._labels = {"model_name": model, "engine": str(engine)}
        self._infos: list[tuple[str, str, float, dict[str, str]]] = []
        counter, histogram = table.counter, table.histogram
        self.prompt_tokens = counter(
            names.PROMPT_TOKENS, "Prompt tokens of scheduled sequences by the source of their KV.", "source", SOURCES
        )
        self.generation_tokens = counter(names.GENERATION_TOKENS, "Generated tokens.")
        reasons = tuple(dict.fromkeys(FINISH_REASONS.values()))
        self.finished = counter(names.REQUEST_SUCCESS, "Finished sequences by finish reason.", "finished_reason", reasons)
        what = "Prompts that a prefill replica was asked to compute: its KV was lent, it had nothing to lend, or it failed."
        self.prefills = counter(names.REMOTE_PREFILLS, what, "result", ("lent", "nothing", "failed"))
        self.ttft = histogram(names.TIME_TO_FIRST_TOKEN, "Seconds from arrival to the first token.", _TTFT)
        self.itl = histogram(names.INTER_TOKEN_LATENCY, "Seconds between successive tokens of a sequence.", _TOKEN)
        self._tpot = histogram(names.TIME_PER_OUTPUT_TOKEN, "Mean seconds per token of a sequence after the first token.", _TOKEN)
        self._e2e = histogram(names.E2E_LATENCY, "Seconds from arrival to the last token.", _REQUEST)
        self._queue = histogram(names.QUEUE_TIME, "Seconds in the core's queue before the first step.", _REQUEST)
        self._prefill = histogram(names.PREFILL_TIME, "Seconds from the first step to the first token.", _REQUEST)
        self._decode = histogram(names.DECODE_TIME, "Seconds from the first token to the last.", _REQUEST)
        self._inference = histogram(names.INFERENCE_TIME, "Seconds from the first step to the last token.", _REQUEST)
        self._prompt = histogram(names.REQUEST_PROMPT_TOKENS, "Prompt tokens of each finished sequence.", _TOKENS)
        self._generated = histogram(names.REQUEST_GENERATION_TOKENS, "Generated tokens of each finished sequence.", _TOKENS)
        self._max_tokens = histogram(names.REQUEST_MAX_TOKENS, "The max_tokens of each sequence.", _TOKENS)
        self._n = histogram(names.REQUEST_N, "Choices per prompt that each request asks for.", _CHOICES)

    # --- what happens ---

    def accepted(self, sampling: Sequence[SamplingParams], n: int) -> None:
        """A request with one element of `sampling` a prompt and `n` choices of each was sent to the core."""
        self._n.observe(n)
        for params in sampling:
            self._max_tokens.observe(params.max_tokens, n)

    def started(self, choice: Choice) -> None:
        """A sequence was scheduled for the first time."""
        self.prompt_tokens.add(choice.cached_tokens, "local_cache")
        self.prompt_tokens.add(choice.prompt_tokens - choice.cached_tokens, "computed")

    def completed(self, choice: Choice, generation: Generation) -> None:
        """A sequence has come to its end and was not cut off."""
        assert choice.finish_reason is not None
        self.finished.add(1, choice.finish_reason)
        if choice.num_tokens or choice.pooled is not None:
            self._e2e.observe(choice.last_time - generation.arrival)
        self._prompt.observe(choice.prompt_tokens)
        self._generated.observe(choice.num_tokens)
        if choice.num_tokens > 1:
            self._tpot.observe((choice.last_time - choice.first_time) / (choice.num_tokens - 1))
        if (spans := intervals(choice)) is not None:
            self._queue.observe(spans.queue)
            self._prefill.observe(spans.prefill)
            self._decode.observe(spans.decode)
            self._inference.observe(spans.prefill + spans.decode)

    def describe(self, name: str, help_text: str, value: float = 1, /, **facts: str) -> None:
        """Tells facts that never change, as the labels of a gauge, whose value is one of them or says nothing."""
        self._infos.append((name, help_text, value, facts))

    # --- what is told ---

    def families(self) -> Iterator[Family]:
        """Every family, for one scrape."""
        yield from self.table.families(self._labels)
        for name, help_text, value, facts in self._infos:
            labels = self._labels | facts
            info = GaugeMetricFamily(name, help_text, labels=list(labels))
            info.add_metric(list(labels.values()), value)
            yield info
        if self.stats is not None:
            yield from _core(self.stats, self._labels)


class Metrics(Collector):
    """The content of `GET /metrics`, for all engines of a replica.

    Args:
        engines: Metrics of each engine.
        vllm_names: Whether all are also reported under vLLM's names.
    """

    def __init__(self, engines: Sequence[EngineMetrics], vllm_names: bool = False) -> None:
        self._engines = engines
        self._vllm_names = vllm_names

    def registry(self) -> CollectorRegistry:
        """A registry with these metrics alone."""
        registry = CollectorRegistry()
        registry.register(self)
        return registry

    def collect(self) -> Iterable[Family]:
        """A family once, with the samples of all engines."""
        merged: dict[str, Family] = {}
        for family in chain.from_iterable(engine.families() for engine in self._engines):
            if family.name in merged:
                merged[family.name].samples += family.samples
            else:
                merged[family.name] = family
        families = list(merged.values())
        return [*families, *vllm_families(families)] if self._vllm_names else families


def _offload(offload: OffloadStats, labels: dict[str, str]) -> Iterator[Family]:
    counter = partial(_samples, CounterMetricFamily, labels)
    yield counter(names.EXTERNAL_CACHE_QUERIES, "Tokens looked up beyond the KV cache.", offload.queried_tokens)
    yield counter(names.EXTERNAL_CACHE_HITS, "Tokens whose KV pages were loaded into the KV cache.", offload.loaded_tokens)
    yield from _tier(offload.memory, labels | {"tier": "memory"})
    for name, lower in offload.lower.items():
        yield from _tier(lower, labels | {"tier": name})
    if offload.transfer is not None:
        yield from _transfer(offload.transfer, labels)


def _transfer(told: TransferStats, labels: dict[str, str]) -> Iterator[Family]:
    gauge, counter = partial(_samples, GaugeMetricFamily, labels), partial(_samples, CounterMetricFamily, labels)
    yield gauge(names.KV_TRANSFER_LEASES, "Prompts whose KV pages wait for another replica.", told.leases)
    yield gauge(names.KV_TRANSFER_LEASED_PAGES, "KV pages in host memory that wait for another replica.", told.leased_pages)
    yield counter(names.KV_TRANSFER_EXPIRED_LEASES, "Prompts whose KV pages no replica has fetched in time.", told.expired_leases)
    yield counter(names.KV_TRANSFER_PULLS, "Prompts whose KV pages this replica began to fetch.", told.pulls)
    yield counter(names.KV_TRANSFER_BYTES, "Bytes of KV pages from other replicas, of one rank.", told.pulled_bytes)
    yield counter(names.KV_TRANSFER_SECONDS, "Seconds from the start of each fetch to its end.", told.pull_s)
    yield counter(names.KV_TRANSFER_FAILED_PAGES, "KV pages that were not fetched, and computed instead.", told.failed_pages)


def _tier(tier: TierStats, labels: dict[str, str]) -> Iterator[Family]:
    gauge, counter = partial(_samples, GaugeMetricFamily, labels), partial(_samples, CounterMetricFamily, labels)
    moved = {"store": tier.stored_bytes, "load": tier.loaded_bytes}
    yield counter(names.KV_OFFLOAD_BYTES, "Bytes of KV pages that were copied, by tier and direction.", moved, "transfer_type")
    seconds = {"store": tier.store_s, "load": tier.load_s}
    yield counter(names.KV_OFFLOAD_SECONDS, "Seconds spent on copies of KV pages.", seconds, "transfer_type")
    pages = {"used": tier.pages_used, "free": tier.pages - tier.pages_used}
    yield gauge(names.KV_OFFLOAD_PAGES, "Places for KV pages in each tier.", pages, "state")
    lost = {"evicted": tier.evicted_pages, "failed": tier.failed_pages}
    yield counter(names.KV_OFFLOAD_LOST_PAGES, "KV pages that were evicted, or whose load failed.", lost, "reason")
    what = "Tokens that were computed because a load of their KV pages would have taken longer."
    yield counter(names.KV_OFFLOAD_DECLINED_TOKENS, what, tier.declined_tokens)
    failures = {"store": tier.failed_stores, "lookup": tier.failed_lookups}
    yield counter(names.KV_OFFLOAD_FAILURES, "Pages not stored, and questions for pages not answered.", failures, "operation")


def _encoder(encoder: EncoderStats, labels: dict[str, str]) -> Iterator[Family]:
    gauge, counter = partial(_samples, GaugeMetricFamily, labels), partial(_samples, CounterMetricFamily, labels)
    images = {"encoded": encoder.encoded, "cached": encoder.cached}
    yield counter(names.ENCODER_IMAGES, "Images of requests: encoded, or found in the cache of embeddings.", images, "result")
    yield counter(names.ENCODER_TOKENS, "Embeddings of images that were computed.", encoder.tokens)
    yield counter(names.ENCODER_SECONDS, "Seconds spent on encoding images.", encoder.seconds)
    what = "Images of unfinished requests that no tower has begun with, equal ones once; a prefix hit may spare some of them."
    yield gauge(names.ENCODER_WAITING_IMAGES, what, encoder.waiting)
    idle = encoder.used - encoder.held
    cache = {"held": encoder.held, "idle": idle, "free": encoder.size - encoder.used}
    yield gauge(names.ENCODER_CACHE_TOKENS, "Embeddings of images in the cache, by state.", cache, "state")


def _experts(experts: ExpertStats, labels: dict[str, str]) -> Iterator[Family]:
    gauge, counter = partial(_samples, GaugeMetricFamily, labels), partial(_samples, CounterMetricFamily, labels)
    served = {str(rank): tokens for rank, tokens in enumerate(experts.served)}
    yield counter(names.EXPERT_TOKENS, "Choices of an expert for a token, by the rank that computed them.", served, "ep_rank")
    told = "Mean load of the ranks with experts over that of the busiest one, in the newest steps; 0 without load."
    yield gauge(names.EXPERT_BALANCEDNESS, told, experts.balancedness)
    yield counter(names.EXPERT_REBALANCES, "Redistributions of experts among the ranks.", experts.rebalances)
    yield counter(names.EXPERT_MOVED_BYTES, "Bytes of experts that ranks took from other ranks.", experts.moved_bytes)


def _core(stats: CoreStats, labels: dict[str, str]) -> Iterator[Family]:
    report = stats.report
    waiting = {reason: report.num_requests_waiting.get(reason, 0) for reason in WAITING_REASONS}
    gauge, counter = partial(_samples, GaugeMetricFamily, labels), partial(_samples, CounterMetricFamily, labels)
    yield gauge(names.NUM_REQUESTS_RUNNING, "Running sequences.", report.num_requests_running)
    yield gauge(names.NUM_REQUESTS_WAITING, "Waiting sequences by reason.", waiting, "reason")
    yield gauge(names.KV_CACHE_USAGE, "Share of KV blocks in use, from 0 to 1.", report.kv_cache_usage_perc)
    yield counter(names.PREEMPTIONS, "Preemptions: running sequences that lost their KV blocks.", stats.preemptions)
    yield counter(names.PREFIX_CACHE_QUERIES, "Prompt tokens looked up in the prefix cache.", stats.prefix_queries)
    yield counter(names.PREFIX_CACHE_HITS, "Prompt tokens found in the prefix cache.", stats.prefix_hits)
    yield counter(names.PREEMPTED_TOKENS, "Tokens whose KV preempted sequences lost.", stats.preempted_tokens)
    resumed = "Tokens that the prefix cache supplied to resumed sequences."
    yield counter(names.RESUMED_CACHED_TOKENS, resumed, stats.resumed_cached_tokens)
    yield _waits(stats, labels)
    if report.lora_slots:
        yield from _lora(stats, labels)
    if stats.offload is not None:
        yield from _offload(stats.offload, labels)
    if stats.encoder is not None:
        yield from _encoder(stats.encoder, labels)
    if stats.experts is not None:
        yield from _experts(stats.experts, labels)
    if (grammars := stats.grammars) is not None:
        results = {"compiled": grammars.compiled, "failed": grammars.failed, "cached": grammars.cached}
        yield counter(names.GRAMMARS, "Grammars of requests by result; cached ones were compiled before.", results, "result")
        yield counter(names.GRAMMAR_COMPILE_SECONDS, "Seconds spent on compiling grammars.", grammars.compile_s)
    if stats.graphs is not None:
        yield from _graphs(stats.graphs, stats.step.graphs if stats.step is not None else [], labels)
    if (step := stats.step) is not None:
        yield _buckets(names.STEP_SECONDS, "Seconds that each step took.", labels, step_meter.SECONDS, step.seconds)
        yield _buckets(names.STEP_TOKENS, "Tokens that each step computed.", labels, step_meter.TOKENS, step.tokens)
        yield counter(names.SAMPLED_TOKENS, "Tokens that were sampled: rows that went through the LM head.", step.sampled_tokens)
        yield counter(names.CORRUPTED_REQUESTS, "Requests that failed because of infinite or NaN logits.", step.not_finite)
        if step.drafts is not None:
            yield from _drafts(step.drafts, counter)
        if step.cost is not None:
            yield from _cost(step.cost, counter)
        if (roofline := step.roofline) is not None:
            floor = "Seconds that the steps would have taken at the device's peak rates, measured at start."
            yield counter(names.STEP_FLOOR_SECONDS, floor, roofline.floor_s)
            yield gauge(
                names.DEVICE_BANDWIDTH,
                "Memory bandwidth of the device in bytes per second, measured at start.",
                roofline.ceilings.bytes_per_s,
            )
            yield gauge(
                names.DEVICE_FLOPS,
                "Floating-point operations per second of matrix products, measured at start.",
                roofline.ceilings.flops_per_s,
            )


def _waits(stats: CoreStats, labels: dict[str, str]) -> Family:
    told = "Seconds in the core's queue before the first step, by reason for waiting."
    family = HistogramMetricFamily(names.WAIT_TIME, told, labels=[*labels, "reason"])
    bounds = [*map(floatToGoString, waits.SECONDS), "+Inf"]
    for reason, buckets in stats.waits.items():
        counts = accumulate(buckets.counts)
        family.add_metric([*labels.values(), reason], list(zip(bounds, counts, strict=True)), buckets.total)
    return family


def _graphs(report: GraphReport, steps: Sequence[GraphSteps], labels: dict[str, str]) -> Iterator[Family]:
    told = "Steps by launch mode, with the reason for the mode."
    family = CounterMetricFamily(names.CUDAGRAPH_STEPS, told, labels=[*labels, "mode", "reason"])
    for item in steps:
        family.add_metric([*labels.values(), item.mode, item.reason], item.steps)
    yield family
    gauge, counter = partial(_samples, GaugeMetricFamily, labels), partial(_samples, CounterMetricFamily, labels)
    tokens = {"real": sum(item.tokens for item in steps), "padding": sum(item.padding for item in steps)}
    yield counter(names.CUDAGRAPH_TOKENS, "Tokens of steps: real tokens and padding.", tokens, "kind")
    states = {"captured": report.captured, "pending": report.pending, "failed": report.failed}
    yield gauge(names.CUDAGRAPHS, "CUDA graphs by state.", states, "state")
    yield gauge(names.CUDAGRAPH_BYTES, "Device memory of CUDA graphs in bytes.", report.num_bytes)


def _lora(stats: CoreStats, labels: dict[str, str]) -> Iterator[Family]:
    report, gauge, counter = stats.report, partial(_samples, GaugeMetricFamily), partial(_samples, CounterMetricFamily)
    yield gauge(labels, names.LORA_SLOTS, "Adapter slots on the device.", report.lora_slots)
    yield gauge(labels, names.LORA_SLOTS_FREE, "Free adapter slots on the device.", report.lora_slots_free)
    yield counter(labels, names.LORA_SLOT_LOADS, "Adapters copied into a slot on the device.", stats.lora_loads)
    yield counter(labels, names.LORA_READS, "Adapters read from their source, repeated reads included.", stats.lora_reads)
    running = ",".join(sorted(name for name, count in report.lora_running.items() if count))
    waiting = ",".join(sorted(report.lora_waiting))
    facts = {"max_lora": str(report.lora_slots), "running_lora_adapters": running, "waiting_lora_adapters": waiting}
    told = "Adapters with running and with waiting requests. The value is the Unix time of the scrape in seconds."
    yield gauge(labels | facts, names.LORA_REQUESTS_INFO, told, time.time())


def _drafts(drafts: DraftStats, counter: Callable[..., Family]) -> Iterator[Family]:
    drafted, accepted = ({str(at): n for at, n in enumerate(each)} for each in (drafts.drafted, drafts.accepted))
    yield counter(names.SPEC_DRAFTS, "Requests with drafts that steps verified.", drafts.rows)
    yield counter(names.SPEC_DRAFT_TOKENS, "Draft tokens that steps verified.", sum(drafts.drafted))
    yield counter(names.SPEC_ACCEPTED_TOKENS, "Draft tokens that steps accepted.", sum(drafts.accepted))
    told = "Draft tokens that steps verified, by position in the draft."
    yield counter(names.SPEC_DRAFT_TOKENS_PER_POS, told, drafted, "position")
    told = "Draft tokens that steps accepted, by position in the draft."
    yield counter(names.SPEC_ACCEPTED_TOKENS_PER_POS, told, accepted, "position")


def _cost(cost: StepCost, counter: Callable[..., Family]) -> Iterator[Family]:
    flops = {"linear": cost.linear_flops, "attention": cost.attention_flops, "lm_head": cost.lm_head_flops}
    reads = {"weights": cost.weight_bytes, "kv": cost.kv_read_bytes}
    yield counter(names.ESTIMATED_FLOPS, "Estimated floating-point operations of all steps.", flops, "part")
    yield counter(names.ESTIMATED_READ_BYTES, "Estimated bytes read by all steps.", reads, "part")
    yield counter(names.ESTIMATED_WRITE_BYTES, "Estimated bytes of keys and values written by all steps.", cost.kv_write_bytes)


def _samples(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    labels: dict[str, str],
    name: str,
    help_text: str,
    values: float | Mapping[str, float],
    label: str = "",
) -> Family:
    """One value, or one for each value of a label."""
    family = kind(name, help_text, labels=[*labels, label] if label else list(labels))
    for value, number in values.items() if isinstance(values, Mapping) else [("", values)]:
        family.add_metric([*labels.values(), value] if label else list(labels.values()), number)
    return family


def _buckets(name: str, help_text: str, labels: dict[str, str], bounds: Sequence[float], buckets: Buckets) -> Family:
    return histogram_family(name, help_text, labels, bounds, buckets.counts, buckets.total)
