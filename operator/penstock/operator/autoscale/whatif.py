"""The same policy on other figures: what a pool would come to if the load were another. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from penstock.api.load_report import LoadReport
from penstock.operator.autoscale.bounds import Decision
from penstock.operator.autoscale.limits import ModelLimits, Settings
from penstock.operator.autoscale.policy import Memory, Observation, PoolMemory, PoolView, decide
from penstock.operator.autoscale.signals import PoolSignals

LOOKS, APART_S = 60, 15.0


@dataclass(frozen=True)
class Outlook:
    """What a pool comes to if what is seen now goes on."""

    next: Decision
    """The next step."""
    settled: Decision
    """The final decision, after the windows have passed and growth has had its time."""


def outlook(
    pools: Mapping[str, PoolView], limits: ModelLimits, settings: Settings, memories: Mapping[str, PoolMemory], wall: float
) -> dict[str, Outlook]:
    """Run the policy repeatedly under a constant load until no size changes.

    Args:
        pools: The pools at the start.
        memories: The learned figures.
        wall: Unix time in seconds. It stays constant, so that schedules apply as they do now.
    """
    first: dict[str, Decision] = {}
    views, memory, decisions = dict(pools), Memory(pools=dict(memories)), dict[str, Decision]()
    unchanged = 0.0
    window = max(its.down_window_s for its in limits.pools.values()) + settings.stable_window_s
    for look in range(LOOKS + int(window / APART_S) * 2):
        decisions, memory = decide(Observation(look * APART_S, wall, views), limits, settings, memory)
        first = first or decisions
        same = all(decisions[name].replicas == view.replicas for name, view in views.items())
        unchanged = unchanged + APART_S if same else 0.0
        if unchanged > window:
            break
        views = {name: replace(view, replicas=decisions[name].replicas, starting=()) for name, view in views.items()}
    return {name: Outlook(first[name], decisions[name]) for name in pools}


def scaled(signals: PoolSignals, factor: float) -> PoolSignals:
    """Return the signals of a load that is `factor` times as large: more requests, tokens and memory, at the same speed."""
    replicas = tuple(replace(it, report=_scaled(it.report, factor)) if it.report else it for it in signals.replicas)
    return replace(signals, held=round(signals.held * factor), replicas=replicas)


def _scaled(report: LoadReport, factor: float) -> LoadReport:
    return msgspec.structs.replace(
        report,
        num_requests_running=round(report.num_requests_running * factor),
        num_requests_waiting={reason: round(count * factor) for reason, count in report.num_requests_waiting.items()},
        kv_cache_usage_perc=report.kv_cache_usage_perc * factor,
        prefill_backlog_tokens=round(report.prefill_backlog_tokens * factor),
        prompt_tokens_per_s=report.prompt_tokens_per_s * factor,
        generation_tokens_per_s=report.generation_tokens_per_s * factor,
    )
