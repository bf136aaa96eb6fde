"""The load of engines that are not ours, in a load report: from their `/metrics`, or from ORCA response headers.

vLLM, SGLang, TensorRT-LLM and llama.cpp name the same things differently. What they do not measure is derived from how their
counters move between two looks. Several engines behind one endpoint count together: queues are added up, memory is as full as
the fullest.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from penstock.api.fleet import Engine
from penstock.api.load_report import LoadReport
from penstock.gateway.load.pages import largest, samples, total
from penstock.gateway.load.traits import BLOCK_SIZE, Traits


class _Names(NamedTuple):
    """What an engine calls it; of several names the first that is there."""

    running: tuple[str, ...]
    waiting: tuple[str, ...]
    usage: tuple[str, ...]
    config: str = ""
    """A series whose labels hold the block size and the number of blocks."""
    config_labels: tuple[str, str] = ("", "")
    block_size: str = ""
    blocks: str = ""
    prompt_tokens: str = ""
    generation_tokens: str = ""
    itl_seconds: tuple[str, ...] = ()
    """Of the time between two tokens of one answer, the sum; what it is divided by:"""
    itl_tokens: tuple[str, ...] = ()
    prefill_time: str = ""
    prefill_tokens: tuple[str, ...] = ()
    """What was computed in that time. Both are counted as a request ends; `prompt_tokens` are as it begins, an answer earlier."""
    prompt_lengths: str = ""


_NAMES: dict[Engine, _Names] = {
    "vllm": _Names(
        running=("vllm:num_requests_running",),
        waiting=("vllm:num_requests_waiting",),
        usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        config="vllm:cache_config_info",
        config_labels=("block_size", "num_gpu_blocks"),
        prompt_tokens="vllm:prompt_tokens_total",
        generation_tokens="vllm:generation_tokens_total",
        itl_seconds=("vllm:inter_token_latency_seconds_sum", "vllm:time_per_output_token_seconds_sum"),
        itl_tokens=("vllm:inter_token_latency_seconds_count", "vllm:time_per_output_token_seconds_count"),
        prefill_time="vllm:request_prefill_time_seconds_sum",
        prefill_tokens=("vllm:request_prefill_kv_computed_tokens_sum", "vllm:request_prompt_tokens_sum"),
        prompt_lengths="vllm:request_prompt_tokens",
    ),
    "sglang": _Names(
        running=("sglang:num_running_reqs",),
        waiting=("sglang:num_queue_reqs",),
        usage=("sglang:token_usage",),
        config="sglang:cache_config_info",
        config_labels=("page_size", "num_pages"),
        block_size="sglang:page_size",
        blocks="sglang:num_pages",
        prompt_tokens="sglang:prompt_tokens_total",
        generation_tokens="sglang:generation_tokens_total",
        itl_seconds=("sglang:inter_token_latency_seconds_sum", "sglang:time_per_output_token_seconds_sum"),
        itl_tokens=("sglang:inter_token_latency_seconds_count", "sglang:time_per_output_token_seconds_count"),
        prompt_lengths="sglang:prompt_tokens_histogram",
    ),
    "trtllm": _Names(
        running=("trtllm_num_requests_running",),
        waiting=("trtllm_num_requests_waiting",),
        usage=("trtllm_kv_cache_utilization",),
        block_size="trtllm_kv_cache_tokens_per_block",
        blocks="trtllm_kv_cache_max_blocks",
    ),
    "llamacpp": _Names(
        running=("llamacpp:requests_processing",),
        waiting=("llamacpp:requests_deferred",),
        usage=(),
        prompt_tokens="llamacpp:prompt_tokens_total",
        generation_tokens="llamacpp:tokens_predicted_total",
        itl_seconds=("llamacpp:tokens_predicted_seconds_total",),
        itl_tokens=("llamacpp:tokens_predicted_total",),
        prefill_time="llamacpp:prompt_seconds_total",
        prefill_tokens=("llamacpp:prompt_tokens_total",),
    ),
}
# By what the same is called in ORCA headers, without the engine's name before it.
_ORCA_WAITING = ("num_requests_waiting", "num_queue_reqs")
_ORCA_RUNNING = ("num_requests_running", "num_running_reqs")
_ORCA_USAGE = ("kv_cache_usage_perc", "kv_cache_utilization", "gpu_cache_usage_perc", "token_usage")
_MARKS: tuple[tuple[bytes, Engine], ...] = (
    (b"penstock_", "penstock"),  # first: ours can speak with vLLM's names too
    (b"vllm:", "vllm"),
    (b"sglang:", "sglang"),
    (b"trtllm_", "trtllm"),
    (b"llamacpp:", "llamacpp"),
)


def engine_of(page: bytes) -> Engine | None:
    """Return the engine that wrote a Prometheus page, or None if it cannot be recognized."""
    return next((engine for mark, engine in _MARKS if page.startswith(mark) or b"\n" + mark in page), None)


class ForeignLoad:
    """What one replica tells from look to look."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine = engine
        self._names = _NAMES[engine]
        self._seq = 0
        self._epoch = 1
        self._counters: dict[str, float] = {}
        self._rates: dict[str, float] = {}
        self._at = 0.0

    def read(self, page: bytes, now: float) -> tuple[LoadReport, Traits]:
        """The report and the settings in a page that was received at `now` (monotonic seconds)."""
        names = self._names
        counters = {
            "prompt": total(page, names.prompt_tokens),
            "generation": total(page, names.generation_tokens),
            "itl_s": total(page, *names.itl_seconds),
            "itl_n": total(page, *names.itl_tokens),
            "prefill_s": total(page, names.prefill_time),
            "prefill_n": total(page, *names.prefill_tokens),
        }
        self._count({name: value for name, value in counters.items() if value is not None}, page, now)
        self._seq += 1
        traits = self._traits(page)
        waiting = round(total(page, *names.waiting) or 0)
        usage = min(largest(page, *names.usage) or 0.0, 1.0)
        report = LoadReport(
            epoch=self._epoch,
            seq=self._seq,
            num_requests_running=round(total(page, *names.running) or 0),
            num_requests_waiting={"capacity": waiting} if waiting else {},
            kv_cache_usage_perc=usage,
            kv_blocks_total=traits.num_blocks,
            kv_blocks_reclaimable=round(traits.num_blocks * (1 - usage)),
            prefill_backlog_tokens=round(waiting * _mean(page, names.prompt_lengths)),
            prefill_tokens_per_s=self._rates.get("prefill", 0.0),
            decode_step_s=self._rates.get("step", 0.0),
            prompt_tokens_per_s=self._rates.get("prompt", 0.0),
            generation_tokens_per_s=self._rates.get("generation", 0.0),
        )
        return _with_adapters(report, page) if self._engine == "vllm" else report, traits

    def _count(self, counters: dict[str, float], page: bytes, now: float) -> None:
        """The rates by which counters have risen since the last look. One that falls is a new process's."""
        before, self._counters = self._counters, counters
        started = largest(page, "process_start_time_seconds")
        if started is not None:
            restarted = self._seq > 0 and round(started * 1000) != self._epoch
            self._epoch = round(started * 1000)
        else:
            restarted = any(value < before.get(name, 0.0) for name, value in counters.items())
            self._epoch += restarted
        passed, self._at = now - self._at, now
        if restarted:
            self._rates.clear()
        if restarted or not before or passed <= 0:
            return
        rise = {name: value - before.get(name, value) for name, value in counters.items()}
        for name in ("prompt", "generation"):
            if name in rise:
                self._rates[name] = rise[name] / passed
        # What has not moved says nothing: the last measurement stands.
        if rise.get("itl_n", 0) > 0:
            self._rates["step"] = rise.get("itl_s", 0.0) / rise["itl_n"]
        if rise.get("prefill_s", 0) > 0 and rise.get("prefill_n", 0) > 0:
            self._rates["prefill"] = rise["prefill_n"] / rise["prefill_s"]

    def _traits(self, page: bytes) -> Traits:
        names = self._names
        size, blocks = largest(page, names.block_size), total(page, names.blocks)
        for sample in samples(page, names.config):
            size = size or _number(sample.label(names.config_labels[0]))
            blocks = (blocks or 0) + _number(sample.label(names.config_labels[1]))
        return Traits(engine=self._engine, block_size=round(size or 0) or BLOCK_SIZE, num_blocks=round(blocks or 0))


def from_orca(last: LoadReport | None, figures: Mapping[str, float]) -> LoadReport | None:
    """The newest report with what an ORCA header of another engine says; None where it says nothing of use."""
    known = {name.rpartition(":")[2].lower(): value for name, value in figures.items()}
    changes: dict[str, object] = {}
    if (queued := _first(known, _ORCA_WAITING)) is not None:
        waiting = round(queued)
        changes["num_requests_waiting"] = {"capacity": waiting} if waiting else {}
    if (running := _first(known, _ORCA_RUNNING)) is not None:
        changes["num_requests_running"] = round(running)
    usage = _first(known, _ORCA_USAGE)
    base = last or LoadReport(epoch=0, seq=0)
    if usage is not None:
        changes["kv_cache_usage_perc"] = min(usage, 1.0)
        changes["kv_blocks_reclaimable"] = round(base.kv_blocks_total * (1 - min(usage, 1.0)))
    return msgspec.structs.replace(base, **changes) if changes else None


def _first(figures: Mapping[str, float], names: Iterable[str]) -> float | None:
    return next((figures[name] for name in names if name in figures), None)


def _with_adapters(report: LoadReport, page: bytes) -> LoadReport:
    """vLLM's adapters: the newest of its series holds names alone, so each counts as one request."""
    info = max(samples(page, "vllm:lora_requests_info"), key=lambda sample: sample.value, default=None)
    if info is None:
        return report
    running = _adapters(info.label("running_lora_adapters"))
    slots = round(_number(info.label("max_lora")))
    return msgspec.structs.replace(
        report,
        lora_slots=slots,
        lora_slots_free=max(slots - len(running), 0),
        lora_running=running,
        lora_waiting=_adapters(info.label("waiting_lora_adapters")),
    )


def _adapters(names: str) -> dict[str, int]:
    return {name.strip(): 1 for name in names.split(",") if name.strip()}


def _mean(page: bytes, histogram: str) -> float:
    count = total(page, f"{histogram}_count") if histogram else None
    return (total(page, f"{histogram}_sum") or 0.0) / count if count else 0.0


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if math.isfinite(number) and number > 0 else 0.0
