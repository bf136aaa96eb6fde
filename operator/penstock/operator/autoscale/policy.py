"""The autoscaling policy: a pure function of signals, limits and its own memory.

Demand is total work, in replicas: what runs, waits for capacity and is held, over what a replica carries; or the KV memory in
use over what should be in use, whichever is more. Requests that wait for a LoRA slot, a grammar or a transfer buy no replica.
Averages over a stable window decide; a short panic window overrules them upwards when demand has outgrown what is ready (as in
Knative's KPA); a pool shrinks to the highest recommendation of the down window (as in Kubernetes' HPA) and never on missing
data.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from penstock.operator.autoscale.signals import PoolSignals, ReplicaSignal

T = TypeVar("T")

Constraint = Literal["Demand", "Tolerance", "Min", "Max", "UpRate", "DownWindow", "Panic", "Pending", "NoData"]


@dataclass(frozen=True)
class Limits:
    """What the InferenceModel asks for."""

    min_replicas: int
    max_replicas: int
    warm: int = 0
    """Ready replicas beyond demand, for bursts shorter than a cold start."""
    scale_to_zero_after_s: float | None = None
    """Idle time after which a pool with `min_replicas` 0 goes to zero."""
    down_window_s: float = 300.0


@dataclass(frozen=True)
class Settings:
    """How the policy behaves; the same for all pools."""

    stable_window_s: float = 60.0
    panic_window_s: float = 6.0
    panic_threshold: float = 2.0
    """Demand over ready capacity at which panic begins."""
    target_utilization: float = 0.75
    """Share of a replica's batch width that demand may fill."""
    target_kv_usage: float = 0.80
    tolerance: float = 0.10
    """A difference below this share of the present size changes nothing."""
    max_up_factor: float = 2.0
    max_up_step: int = 4
    """In `up_period_s` a pool grows to `max_up_factor` times its size or by `max_up_step`, whichever is more."""
    up_period_s: float = 15.0
    stale_after_s: float = 15.0
    """A report older than this says nothing any more."""
    cold_start_factor: float = 1.5
    """A replica that is not ready counts as supply while younger than this many learned cold starts."""


@dataclass(frozen=True)
class Observation:
    """One look at a pool."""

    now: float
    """Seconds on any steady clock."""
    replicas: int
    """What the workload is asked to have."""
    pending_ages_s: tuple[float, ...]
    """Ages of the replicas that are not ready."""
    signals: PoolSignals | None
    """None: no gateway answered."""


@dataclass(frozen=True)
class Memory:
    """What the policy remembers between looks; begins empty, so that a restarted operator shrinks nothing for a whole window."""

    demand: tuple[tuple[float, float], ...] = ()
    """(time, demand in replicas)."""
    recommended: tuple[tuple[float, int], ...] = ()
    sizes: tuple[tuple[float, int], ...] = ()
    """(time, replicas asked for), for the growth limit."""
    panic_until: float = -math.inf
    busy_at: float | None = None
    """When there was last any work."""
    started_at: float | None = None
    width: float = 0.0
    """Requests at once that a replica takes (`max_num_seqs`), remembered for when none is there to ask."""
    cold_start_s: float = 30.0
    """Learned time from creation to ready."""
    pending_age_s: float = 0.0
    """Age of the oldest pending replica at the last look."""


@dataclass(frozen=True)
class Decision:
    """What to do, and why."""

    replicas: int
    constraint: Constraint
    """What the number was bound by."""
    reason: str
    """One sentence for people."""
    inputs: dict[str, float] = field(default_factory=dict[str, float])
    """The figures that the sentence rests on."""


@dataclass(frozen=True)
class _Load:
    """Demand of one look."""

    replicas_needed: float
    requests: float
    kv: float
    other_waiting: int
    unknown: int
    """Ready replicas whose load is not known."""


@dataclass(frozen=True)
class _Case:
    """Everything that the rules below look at."""

    seen: Observation
    held: int
    limits: Limits
    settings: Settings
    memory: Memory
    load: _Load
    demand: float
    panicking: bool
    wanted: int
    inputs: dict[str, float]

    @property
    def bounded(self) -> int:
        """What is wanted, within the user's limits."""
        return min(max(self.wanted, self.limits.min_replicas), self.limits.max_replicas)

    @property
    def ask(self) -> str:
        """The demand as a sentence begins with it."""
        return f"demand is {self.demand:.2f} replicas ({self.load.requests:.0f} requests, KV usage {self.load.kv:.2f} in all)"

    def settle(self, replicas: int, constraint: Constraint, why: str) -> Decision:
        """A decision that quotes the demand and the inputs."""
        return Decision(replicas, constraint, f"{self.ask}{why}", self.inputs)


def decide(seen: Observation, limits: Limits, settings: Settings, memory: Memory) -> tuple[Decision, Memory]:
    """The size that the pool should have now, and the memory for the next look."""
    memory = _learn(seen, memory)
    if seen.signals is None:
        kept = min(max(seen.replicas, limits.min_replicas), limits.max_replicas)
        return Decision(kept, "NoData", "no gateway answered; nothing shrinks"), memory
    signals = seen.signals
    load = _load(signals, settings, memory)
    ready = sum(r.ready and not r.cordoned for r in signals.replicas)
    memory = _remember(seen, signals, load, settings, memory)
    stable = _mean(memory.demand, seen.now - settings.stable_window_s)
    panic = _mean(memory.demand, seen.now - settings.panic_window_s)
    if panic >= settings.panic_threshold * max(ready, 1):
        memory = replace(memory, panic_until=seen.now + settings.stable_window_s)
    panicking = seen.now < memory.panic_until
    demand = max(stable, panic) if panicking else stable
    wanted = _wanted(demand, seen.now, signals.held, limits, memory)
    memory = replace(memory, recommended=_window((*memory.recommended, (seen.now, wanted)), seen.now - limits.down_window_s))
    inputs = {
        "demand": round(demand, 3),
        "requests": load.requests,
        "kv_usage": round(load.kv, 3),
        "held": signals.held,
        "ready": ready,
        "pending": len(seen.pending_ages_s),
        "waiting_for_other_reasons": load.other_waiting,
    }
    case = _Case(seen, signals.held, limits, settings, memory, load, demand, panicking, wanted, inputs)
    decision = _grow(case) if case.bounded > seen.replicas else _shrink(case) if case.bounded < seen.replicas else _stay(case)
    return decision, memory


def _learn(seen: Observation, memory: Memory) -> Memory:
    """Cold start is the age at which the oldest pending replica was last seen before it became ready."""
    oldest = max(seen.pending_ages_s, default=0.0)
    if memory.pending_age_s > oldest:
        memory = replace(memory, cold_start_s=0.5 * (memory.cold_start_s + memory.pending_age_s))
    started = seen.now if memory.started_at is None else memory.started_at
    return replace(memory, pending_age_s=oldest, started_at=started)


def _fresh(replica: ReplicaSignal, settings: Settings) -> bool:
    return replica.report is not None and replica.report_age_s is not None and replica.report_age_s <= settings.stale_after_s


def _load(signals: PoolSignals, settings: Settings, memory: Memory) -> _Load:
    known = [r.report for r in signals.replicas if _fresh(r, settings) and r.report is not None]
    requests = float(signals.held) + sum(r.num_requests_running + r.num_requests_waiting.get("capacity", 0) for r in known)
    kv = sum(r.kv_cache_usage_perc for r in known)
    width = max((float(r.max_num_seqs) for r in known), default=memory.width)
    needed = requests / (settings.target_utilization * width) if width else float(bool(requests))
    return _Load(
        replicas_needed=max(needed, kv / settings.target_kv_usage),
        requests=requests,
        kv=kv,
        other_waiting=sum(r.waiting - r.num_requests_waiting.get("capacity", 0) for r in known),
        unknown=sum(r.ready and not r.cordoned and not _fresh(r, settings) for r in signals.replicas),
    )


def _remember(seen: Observation, signals: PoolSignals, load: _Load, settings: Settings, memory: Memory) -> Memory:
    now = seen.now
    widths = [float(r.report.max_num_seqs) for r in signals.replicas if r.report is not None]
    return replace(
        memory,
        demand=_window((*memory.demand, (now, load.replicas_needed)), now - settings.stable_window_s),
        busy_at=now if load.requests or memory.busy_at is None else memory.busy_at,
        sizes=_window((*memory.sizes, (now, seen.replicas)), now - settings.up_period_s),
        width=max(widths, default=memory.width),
    )


def _wanted(demand: float, now: float, held: int, limits: Limits, memory: Memory) -> int:
    """The size that demand asks for; at least one replica unless the pool has been idle for long enough to go to zero."""
    wanted = math.ceil(demand - 1e-9) + limits.warm
    idle_for = now - (memory.busy_at if memory.busy_at is not None else now)
    may_sleep = limits.scale_to_zero_after_s is not None and idle_for >= limits.scale_to_zero_after_s and not held
    return wanted if may_sleep else max(wanted, 1)


def _stay(case: _Case) -> Decision:
    size = case.seen.replicas
    if case.wanted > case.limits.max_replicas:
        return case.settle(size, "Max", f", more than max {case.limits.max_replicas}")
    if case.wanted < case.limits.min_replicas:
        return case.settle(size, "Min", f"; min is {case.limits.min_replicas}")
    return case.settle(size, "Demand", "")


def _grow(case: _Case) -> Decision:
    size, limits, settings = case.seen.replicas, case.limits, case.settings
    urgent = case.held or case.panicking or size < limits.min_replicas or size == 0
    if not urgent and case.demand - size <= settings.tolerance * size:
        return case.settle(size, "Tolerance", f", within {settings.tolerance:.0%} of {size}")
    base = min(count for _, count in case.memory.sizes)
    ceiling = max(math.floor(base * settings.max_up_factor), base + settings.max_up_step, limits.min_replicas)
    if case.bounded > ceiling:
        pace = f"; growth is limited to {ceiling} in {settings.up_period_s:.0f} s"
        return case.settle(max(ceiling, size), "UpRate", pace)
    if case.wanted > limits.max_replicas:
        return case.settle(case.bounded, "Max", f"; max is {limits.max_replicas}")
    if case.wanted < limits.min_replicas:
        return case.settle(case.bounded, "Min", f"; min is {limits.min_replicas}")
    return case.settle(case.bounded, "Panic" if case.panicking else "Demand", f", {size} are asked for")


def _shrink(case: _Case) -> Decision:
    size, limits, now = case.seen.replicas, case.limits, case.seen.now
    if size > limits.max_replicas:
        return case.settle(limits.max_replicas, "Max", f"; max is {limits.max_replicas}")
    if case.load.unknown:
        return case.settle(size, "NoData", f", but the load of {case.load.unknown} ready replicas is unknown; nothing shrinks")
    if case.panicking:
        return case.settle(size, "Panic", f"; nothing shrinks for {case.memory.panic_until - now:.0f} s after a burst")
    patience = case.settings.cold_start_factor * case.memory.cold_start_s
    if any(age < patience for age in case.seen.pending_ages_s):
        return case.settle(size, "Pending", f"; {len(case.seen.pending_ages_s)} replicas are starting")
    watched = now - (case.memory.started_at if case.memory.started_at is not None else now)
    highest = max(count for _, count in case.memory.recommended)
    floor = size if watched < limits.down_window_s else min(max(highest, case.bounded), size)
    if floor > case.bounded:
        return case.settle(floor, "DownWindow", f"; the most of the last {limits.down_window_s:.0f} s counts")
    if case.wanted < limits.min_replicas:
        return case.settle(case.bounded, "Min", f"; min is {limits.min_replicas}")
    return case.settle(case.bounded, "Demand", f", {size} are asked for")


def _mean(samples: tuple[tuple[float, float], ...], since: float) -> float:
    inside = [value for time, value in samples if time >= since]
    return sum(inside) / len(inside) if inside else 0.0


def _window(samples: tuple[tuple[float, T], ...], since: float) -> tuple[tuple[float, T], ...]:
    return tuple(sample for sample in samples if sample[0] >= since)
