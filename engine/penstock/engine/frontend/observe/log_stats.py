"""Log one line per period about the engine's work since the last line."""

import asyncio
import logging
import time

import msgspec

from penstock.engine.frontend.observe.metrics import EngineMetrics

log = logging.getLogger(__name__)

PERIOD_S = 10.0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start, and the state now."""

    prompt_tokens: float = 0
    cached_tokens: float = 0
    """Prompt tokens that the prefix cache supplied."""
    generation_tokens: float = 0
    preemptions: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    floor_seconds: float = 0.0
    """What the steps would have taken at the device's ceilings; 0 where these are not known."""
    running: int = 0
    waiting: dict[str, int] = {}
    """Waiting requests by reason."""
    kv_usage: float = 0.0
    drafted: int = 0
    accepted: int = 0
    """Accepted drafts."""


def snapshot(metrics: EngineMetrics) -> Snapshot:
    """Return the engine's present figures."""
    totals, stats = metrics.table.totals(), metrics.stats
    prompt = metrics.prompt_tokens.by_value(totals)
    counts = Snapshot(
        prompt_tokens=sum(prompt.values()),
        cached_tokens=prompt["local_cache"],
        generation_tokens=metrics.generation_tokens.by_value(totals)[""],
    )
    if stats is None:
        return counts
    return msgspec.structs.replace(
        counts,
        preemptions=stats.preemptions,
        steps=stats.steps,
        step_seconds=stats.step.seconds.total if stats.step else 0.0,
        floor_seconds=stats.step.roofline.floor_s if stats.step and stats.step.roofline else 0.0,
        running=stats.report.num_requests_running,
        waiting={reason: count for reason, count in stats.report.num_requests_waiting.items() if count},
        kv_usage=stats.report.kv_cache_usage_perc,
        drafted=sum(stats.step.drafts.drafted) if stats.step and stats.step.drafts else 0,
        accepted=sum(stats.step.drafts.accepted) if stats.step and stats.step.drafts else 0,
    )


def describe(before: Snapshot, now: Snapshot, seconds: float) -> str | None:
    """Return the line for the time between two snapshots; None if nothing happened and no request waits or runs."""
    steps = now.steps - before.steps
    if not (steps or now.running or now.waiting or now.prompt_tokens > before.prompt_tokens):
        return None
    prompt = now.prompt_tokens - before.prompt_tokens
    parts = [
        f"prompt {prompt / seconds:.1f} tok/s",
        f"generation {(now.generation_tokens - before.generation_tokens) / seconds:.1f} tok/s",
        f"running {now.running}",
        f"waiting {sum(now.waiting.values())}{_reasons(now.waiting)}",
        f"KV {now.kv_usage:.1%}",
    ]
    if prompt:
        parts.append(f"prefix hits {(now.cached_tokens - before.cached_tokens) / prompt:.1%}")
    if steps:
        spent, floor = now.step_seconds - before.step_seconds, now.floor_seconds - before.floor_seconds
        parts.append(f"step {1000 * spent / steps:.2f} ms" + (f" ({floor / spent:.0%} of the roofline)" if floor else ""))
    if drafted := now.drafted - before.drafted:
        parts.append(f"drafts accepted {(now.accepted - before.accepted) / drafted:.1%} of {drafted}")
    if preemptions := now.preemptions - before.preemptions:
        parts.append(f"preemptions {preemptions}")
    return ", ".join(parts)


async def log_stats(metrics: EngineMetrics, name: str = "", period: float = PERIOD_S) -> None:
    """Log the line, behind a name, after every `period` seconds in which something happened."""
    before, began = snapshot(metrics), time.monotonic()
    while True:
        await asyncio.sleep(period)
        now, ended = snapshot(metrics), time.monotonic()
        if (line := describe(before, now, ended - began)) is not None:
            log.info("%s%s", name, line)
        before, began = now, ended


def _reasons(waiting: dict[str, int]) -> str:
    """Said where it is not simply room that lacks."""
    if not set(waiting) - {"capacity"}:
        return ""
    return " (" + ", ".join(f"{reason} {count}" for reason, count in sorted(waiting.items())) + ")"
