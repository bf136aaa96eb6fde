"""From the size that demand asks for to the size that is set: limit growth, delay shrinking, and name the bound that applied.
Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from penstock.operator.autoscale.demand import Demand
from penstock.operator.autoscale.limits import Limits, Settings

Constraint = Literal[
    "Demand", "Tolerance", "Min", "Max", "Schedule", "UpRate", "DownWindow", "Panic", "Pending", "NoData", "Ratio", "Budget"
]

WAITING_FOR = "waiting_for_"
"""Before the reason, in the names of the inputs that count what no replica more would help."""


@dataclass(frozen=True)
class Decision:
    """What to do, and why."""

    replicas: int
    constraint: Constraint
    """What the number was bound by."""
    reason: str
    """One sentence for people."""
    blind: bool = False
    """Gateways or ready replicas have not said for a while how they are: it grows by what is known, and never shrinks."""
    inputs: Mapping[str, float] = field(default_factory=dict[str, float])
    """The figures that the sentence rests on."""
    out_of_reach: str = ""
    """The goals that no number of replicas meets and that are therefore ignored, in a sentence."""


@dataclass(frozen=True)
class Case:
    """All inputs of the rules below."""

    size: int
    """Replicas that the workload is asked to have."""
    wanted: int
    """That demand asks for, warm ones included."""
    scheduled: int
    """That the schedule asks for now."""
    limits: Limits
    settings: Settings
    demand: Demand | None
    """None: nothing is known."""
    group_demand: float
    short: bool
    """The pools of the role lack more than the tolerance, all together."""
    factor: float
    held: int
    panic_s: float
    """Seconds after a burst in which nothing shrinks. 0: there was no burst."""
    no_gateway: bool
    """No gateway answers, so the number of requests that they hold is unknown."""
    blind: bool
    """A signal has been unknown for too long."""
    young: int
    """Replicas that are starting and shall be waited for."""
    stuck: int
    """Replicas that should have started long ago."""
    cold_start_s: float
    highest: int
    """The highest recommendation in the down window."""
    watched_s: float
    """Since the policy began."""
    base: int
    """The smallest size in the growth period."""
    out_of_reach: str = ""
    """The goal that no number of replicas meets, as in `Decision`."""

    @property
    def low(self) -> int:
        """The least that is allowed now."""
        return max(self.limits.min_replicas, self.scheduled)

    @property
    def bounded(self) -> int:
        """What is wanted, within the user's limits."""
        return min(max(self.wanted, self.low), self.limits.max_replicas)

    @property
    def floor(self) -> Constraint:
        """The name of `low`."""
        return "Schedule" if self.scheduled > self.limits.min_replicas else "Min"

    def settle(self, replicas: int, constraint: Constraint, why: str) -> Decision:
        """A decision that quotes the demand and the inputs."""
        ignored = f"; {self.out_of_reach}" if self.out_of_reach else ""
        return Decision(replicas, constraint, f"{ask(self)}{why}{ignored}", self.blind, figures(self), self.out_of_reach)


def bound(case: Case) -> Decision:
    """The size that the pool should have now."""
    if case.demand is None:
        kept = min(max(case.size, case.low), case.limits.max_replicas)
        return Decision(kept, "NoData", "neither a gateway nor a replica answered; nothing shrinks", blind=True)
    if case.bounded > case.size:
        return _grow(case)
    return _shrink(case) if case.bounded < case.size else _stay(case)


def _stay(case: Case) -> Decision:
    if case.wanted > case.limits.max_replicas:
        return case.settle(case.size, "Max", f", more than max {case.limits.max_replicas}")
    if case.wanted < case.low:
        return case.settle(case.size, case.floor, f"; at least {case.low} are to be there")
    return case.settle(case.size, "Demand", "")


def _grow(case: Case) -> Decision:
    size, limits, settings = case.size, case.limits, case.settings
    urgent = case.held or case.panic_s or size < case.low or size == 0
    if not urgent and not case.short:
        return case.settle(size, "Tolerance", f", within {settings.tolerance:.0%} of what {size} carry")
    ceiling = max(math.floor(case.base * limits.max_up_factor), case.base + limits.max_up_step, case.low)
    if case.bounded > ceiling:
        pace = f"; growth is limited to {ceiling} in {limits.up_period_s:.0f} s"
        return case.settle(max(ceiling, size), "UpRate", pace)
    if case.wanted > limits.max_replicas:
        return case.settle(case.bounded, "Max", f"; max is {limits.max_replicas}")
    if case.wanted < case.low:
        return case.settle(case.bounded, case.floor, f"; at least {case.low} are to be there")
    return case.settle(case.bounded, "Panic" if case.panic_s else "Demand", f", {size} are asked for")


def _shrink(case: Case) -> Decision:
    size, limits = case.size, case.limits
    if size > limits.max_replicas:
        return case.settle(limits.max_replicas, "Max", f"; max is {limits.max_replicas}")
    if case.no_gateway:
        return case.settle(size, "NoData", ", but no gateway answers: what they hold is unknown; nothing shrinks")
    if case.demand is not None and case.demand.unknown:
        return case.settle(size, "NoData", f", but the load of {case.demand.unknown} ready replicas is unknown; nothing shrinks")
    if case.panic_s:
        return case.settle(size, "Panic", f"; nothing shrinks within {case.panic_s:.0f} s of a burst")
    if case.young:
        return case.settle(size, "Pending", f"; {case.young} replicas are starting, which takes {case.cold_start_s:.0f} s")
    floor = size if case.watched_s < limits.down_window_s else min(max(case.highest, case.bounded), size)
    if floor > case.bounded:
        return case.settle(floor, "DownWindow", f"; the most of the last {limits.down_window_s:.0f} s counts")
    if case.wanted < case.low:
        return case.settle(case.bounded, case.floor, f"; at least {case.low} are to be there")
    return case.settle(case.bounded, "Demand", f", {size} are asked for")


def ask(case: Case) -> str:
    """The demand as a sentence begins with it."""
    demand = case.demand
    if demand is None:
        return "demand is unknown"
    what = {
        "work": f"{demand.prompt_tokens_per_s:.0f} prompt and {demand.output_tokens_per_s:.0f} output tokens/s",
        "width": f"{demand.requests:.0f} requests",
        "kv": f"KV usage {demand.kv_usage:.2f} in all",
    }[demand.measure]
    corrected = f", times {case.factor:.2f} for the SLO" if abs(case.factor - 1) >= 0.005 else ""
    waits = "".join(
        f"; {count} wait for {reason}, which no replica more would help" for reason, count in demand.other_waiting.items()
    )
    return f"demand is {case.group_demand:.2f} replicas ({what}{corrected}){waits}"


def figures(case: Case) -> dict[str, float]:
    """What the decision rests on, by name."""
    demand = case.demand
    if demand is None:
        return {}
    return {
        "demand": round(case.group_demand, 3),
        "work": round(demand.work, 3),
        "width": round(demand.width, 3),
        "kv": round(demand.kv, 3),
        "requests": demand.requests,
        "kv_usage": round(demand.kv_usage, 3),
        "prompt_tokens_per_s": round(demand.prompt_tokens_per_s, 1),
        "output_tokens_per_s": round(demand.output_tokens_per_s, 1),
        "backlog_tokens": demand.backlog_tokens,
        "held": case.held,
        "pending": case.young + case.stuck,
        "stuck": case.stuck,
        **{f"{WAITING_FOR}{reason}": count for reason, count in demand.other_waiting.items()},
        "cold_start_s": round(case.cold_start_s, 1),
        "slo_factor": round(case.factor, 3),
    }
