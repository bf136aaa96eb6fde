"""How much work a pool has, in replicas of that pool. Pure.

Three measures, of which the largest counts: *work*, the rates of prompt and output tokens over what a replica computes; *width*,
the sequences at once over what a replica holds; *kv*, the KV memory in use. Requests that wait for a LoRA slot, a grammar, KV
from elsewhere or the rest of their prompt buy no replica.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.api.fleet import Role
from penstock.api.load_report import WAITING_REASONS, LoadReport, WaitingReason
from penstock.operator.autoscale.capacity import Capacity
from penstock.operator.autoscale.limits import Limits, Settings
from penstock.operator.autoscale.signals import PoolSignals, ReplicaSignal

_OTHER_REASONS: tuple[WaitingReason, ...] = tuple(reason for reason in WAITING_REASONS if reason != "capacity")


@dataclass(frozen=True)
class Backlog:
    """Prompt tokens that waited at each replica at some time, so that the next look can tell how fast they grow."""

    at: float = 0.0
    tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    """Tokens by replica UID."""

    def growth(self, now: "Backlog") -> float:
        """Tokens a second from here to `now`, over the replicas that are in both."""
        seconds = now.at - self.at
        if seconds <= 0:
            return 0.0
        return sum(tokens - self.tokens[uid] for uid, tokens in now.tokens.items() if uid in self.tokens) / seconds


@dataclass(frozen=True)
class Demand:
    """Demand of one pool at one observation, in replicas: the number needed if each were filled to its target."""

    work: float
    width: float
    kv: float
    requests: float
    """Held, running, and waiting for capacity."""
    kv_usage: float
    """Sum over the replicas."""
    prompt_tokens_per_s: float
    """That arrive: computed, and what the backlog grows by."""
    output_tokens_per_s: float
    backlog_tokens: int
    other_waiting: Mapping[str, int]
    """Requests that a replica more would not help, by what they wait for."""
    in_flight: int
    """Requests that the gateways sent to its replicas and whose end they have not seen."""
    unknown: int
    """Ready replicas whose load is not known."""

    @property
    def idle(self) -> bool:
        """Whether there is no request at all: none runs, waits for whatever reason, is held or on its way."""
        return not (self.requests or self.other_waiting or self.in_flight)

    @property
    def replicas(self) -> float:
        """The measure that counts."""
        return max(self.work, self.width, self.kv)

    @property
    def measure(self) -> str:
        """The measure with the largest demand."""
        return max(("work", self.work), ("width", self.width), ("kv", self.kv), key=lambda pair: pair[1])[0]


def known(signals: PoolSignals, settings: Settings) -> dict[str, LoadReport]:
    """The reports that are fresh enough to count, by UID."""
    return {r.uid: r.report for r in signals.replicas if r.report is not None and _fresh(r, settings)}


def unknown(signals: PoolSignals, settings: Settings) -> int:
    """Ready replicas whose load is not known."""
    return sum(r.ready and not r.cordoned and not _fresh(r, settings) for r in signals.replicas)


def _fresh(replica: ReplicaSignal, settings: Settings) -> bool:
    return replica.report is not None and replica.report_age_s is not None and replica.report_age_s <= settings.stale_after_s


def backlog(reports: Mapping[str, LoadReport], now: float) -> Backlog:
    """What waits to be computed."""
    return Backlog(now, {uid: report.prefill_backlog_tokens for uid, report in reports.items()})


def measure(
    signals: PoolSignals,
    capacity: Capacity,
    limits: Limits,
    settings: Settings,
    *,
    growth_tokens_per_s: float = 0.0,
    cold_start_s: float = 0.0,
    parked: int = 0,
) -> Demand:
    """The pool's demand.

    Args:
        growth_tokens_per_s: By which its backlog grew since the last look.
        cold_start_s: Help takes so long.
        parked: Requests that wait elsewhere for what this pool computes.
    """
    reports = known(signals, settings)
    waiting = [report.num_requests_waiting for report in reports.values()]
    requests = float(signals.held + parked) + sum(r.num_requests_running for r in reports.values())
    requests += sum(reasons.get("capacity", 0) for reasons in waiting)
    prompt = max(sum(r.prompt_tokens_per_s for r in reports.values()) + growth_tokens_per_s, 0.0)
    output = sum(r.generation_tokens_per_s for r in reports.values())
    tokens = sum(r.prefill_backlog_tokens for r in reports.values())
    kv = sum(r.kv_cache_usage_perc for r in reports.values())
    due = tokens / max(settings.drain_backlog_s, cold_start_s)
    itl_s = limits.goals.itl_s if limits.goals and limits.role != "Prefill" else None
    work = _work(limits.role, capacity, prompt + due, output, itl_s)
    rows = capacity.rows(itl_s)
    width = requests / (rows * limits.target_utilization) if rows else float(bool(requests))
    other = {reason: sum(reasons.get(reason, 0) for reasons in waiting) for reason in _OTHER_REASONS}
    return Demand(
        work=work / limits.target_utilization,
        width=width,
        kv=kv / limits.target_kv_usage,
        requests=requests,
        kv_usage=kv,
        prompt_tokens_per_s=prompt,
        output_tokens_per_s=output,
        backlog_tokens=tokens,
        other_waiting={reason: count for reason, count in other.items() if count},
        in_flight=sum(replica.in_flight for replica in signals.replicas),
        unknown=unknown(signals, settings),
    )


def _work(role: Role, capacity: Capacity, prompt: float, output: float, itl_s: float | None) -> float:
    """Replicas that are busy the whole time; what was not learned yet counts nothing here (and shows in the other measures)."""
    decode = capacity.output_tokens_per_s(itl_s)
    prefills = prompt / capacity.prefill_tokens_per_s if capacity.prefill_tokens_per_s and role != "Decode" else 0.0
    decodes = output / decode if decode and role != "Prefill" else 0.0
    return prefills + decodes
