"""The autoscaling policy: a pure function of what is seen, what is asked and its own memory.

Demand is total work (`demand`), in replicas as they were learned (`capacity`). Pools of one role carry their demand together and
are filled by price (`allocation`). Averages over a stable window decide; a short panic window overrules them upwards when demand
has outgrown what is ready (as in Knative's KPA); a pool shrinks to the highest recommendation of the down window (as in
Kubernetes' HPA), and never on missing data (`bounds`). What clients really get corrects the demand (`correction`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import get_args

from penstock.api.fleet import Role
from penstock.operator.autoscale.allocation import Member, Offer, afford, allocate, balance, units
from penstock.operator.autoscale.attainable import describe, itl_out_of_reach, reachable
from penstock.operator.autoscale.bounds import Case, Decision, bound
from penstock.operator.autoscale.capacity import Capacity, learn
from penstock.operator.autoscale.coldstart import ColdStart, Starting
from penstock.operator.autoscale.correction import Correction, Seen
from penstock.operator.autoscale.demand import Backlog, Demand, backlog, known, measure, unknown
from penstock.operator.autoscale.limits import Limits, ModelLimits, Settings
from penstock.operator.autoscale.schedule import floor
from penstock.operator.autoscale.signals import PoolSignals
from penstock.operator.autoscale.windows import Samples, kept, mean

ROLES: tuple[Role, ...] = get_args(Role)
UNBOUNDED = 10**6
_ROOM = "the namespace's budget leaves this model"
"""More replicas than any pool may have: the dearest pool of a role wants all that the others cannot carry."""


@dataclass(frozen=True)
class PoolView:
    """One look at a pool."""

    replicas: int
    """What the workload is asked to have."""
    starting: tuple[Starting, ...]
    """The replicas that are not ready."""
    signals: PoolSignals | None
    """The signals; None if nothing answered."""
    started_s: tuple[float, ...] = ()
    """Seconds from creation to ready of the replicas that have become ready for the first time since the last look."""


@dataclass(frozen=True)
class Observation:
    """One look at a model."""

    now: float
    """Seconds on any steady clock."""
    wall: float
    """Unix time in seconds."""
    pools: Mapping[str, PoolView]
    """The pools that the autoscaler sizes, by name."""


@dataclass(frozen=True)
class PoolMemory:
    """What is remembered of a pool."""

    capacity: Capacity = field(default_factory=Capacity)
    cold_start: ColdStart = field(default_factory=ColdStart)
    correction: Correction = field(default_factory=Correction)
    backlog: Backlog = field(default_factory=Backlog)
    recommended: Samples[int] = ()
    sizes: Samples[int] = ()
    """Replicas asked for, for the growth limit."""
    itl_out_of_reach: bool = False
    """The promised time between tokens is shorter than a step over one request."""
    clear_at: float | None = None
    """When the load of all ready replicas was last known, and what gateways hold."""


@dataclass(frozen=True)
class GroupMemory:
    """What is remembered of the pools of one role together."""

    demand: Samples[float] = ()
    """Demand in replicas of the model's strongest pool."""
    panic_until: float = -math.inf
    busy_at: float | None = None
    """When there was last any work."""


@dataclass(frozen=True)
class Memory:
    """What the policy remembers of a model between looks. It begins empty, or with what `learned` kept of an earlier life; either
    way nothing shrinks for a whole window."""

    started_at: float | None = None
    pools: Mapping[str, PoolMemory] = field(default_factory=dict[str, PoolMemory])
    groups: Mapping[str, GroupMemory] = field(default_factory=dict[str, GroupMemory])


@dataclass(frozen=True)
class _Group:
    """The pools of one role at one look."""

    role: Role
    names: tuple[str, ...]
    unit: Mapping[str, float]
    demands: Mapping[str, Demand]
    ready: float
    """What is ready carries so much, in units."""
    asked: float
    """What the workloads are asked to have; what does not start is left out."""
    stable: float
    panic: float
    panicking: bool
    idle_s: float
    held: int

    @property
    def demand(self) -> float:
        """The demand in units."""
        return max(self.stable, self.panic) if self.panicking else self.stable


def decide(seen: Observation, limits: ModelLimits, settings: Settings, memory: Memory) -> tuple[dict[str, Decision], Memory]:
    """The size that each pool should have now, and the memory for the next look."""
    memory = replace(memory, started_at=seen.now if memory.started_at is None else memory.started_at)
    pools = {
        name: _observe(view, limits.pools[name], settings, memory.pools.get(name, PoolMemory()), seen.now)
        for name, view in seen.pools.items()
    }
    ignored = {name: _out_of_reach(limits.pools[name], its) for name, its in pools.items()}
    limits = replace(limits, pools={name: _reachable(its, pools.get(name)) for name, its in limits.pools.items()})
    groups, decisions, group_memories = list[_Group](), dict[str, Decision](), dict[str, GroupMemory]()
    for role in ROLES:
        names = tuple(sorted(name for name in seen.pools if limits.pools[name].role == role))
        if not names:
            continue
        group, group_memories[role] = _look(role, names, seen, limits, settings, pools, memory)
        wanted = _wanted(group, seen, limits, settings, pools)
        for name in names:
            pools[name] = _recommend(pools[name], wanted[name], seen, limits.pools[name], name)
            case = _case(name, wanted[name], group, seen, limits, settings, pools[name], memory)
            decisions[name] = bound(replace(case, out_of_reach=ignored[name]))
        groups.append(group)
    decisions = _together(decisions, groups, seen, limits)
    pools = {name: _correct(name, pools[name], decisions[name], groups, seen, limits, settings) for name in pools}
    return decisions, replace(memory, pools=pools, groups=group_memories)


def _observe(view: PoolView, limits: Limits, settings: Settings, memory: PoolMemory, now: float) -> PoolMemory:
    """What a look teaches about a pool's replicas."""
    reports = known(view.signals, settings) if view.signals is not None else {}
    clear = memory.clear_at is None or (
        view.signals is not None and view.signals.complete and not unknown(view.signals, settings)
    )
    capacity = learn(memory.capacity, reports.values())
    return replace(
        memory,
        clear_at=now if clear else memory.clear_at,
        capacity=capacity,
        itl_out_of_reach=itl_out_of_reach(capacity.line, limits.goals, memory.itl_out_of_reach),
        cold_start=memory.cold_start.observe(view.started_s, limits.cold_start_s),
    )


def _reachable(limits: Limits, memory: PoolMemory | None) -> Limits:
    """The limits without a goal that no number of replicas meets."""
    return replace(limits, goals=reachable(limits.goals, itl_out_of_reach=memory is not None and memory.itl_out_of_reach))


def _out_of_reach(limits: Limits, memory: PoolMemory) -> str:
    gave_up = memory.correction.gave_up_at is not None
    return describe(limits.goals, memory.capacity.line, itl_out_of_reach=memory.itl_out_of_reach, ttft_out_of_reach=gave_up)


def _look(
    role: Role,
    names: tuple[str, ...],
    seen: Observation,
    limits: ModelLimits,
    settings: Settings,
    pools: dict[str, PoolMemory],
    memory: Memory,
) -> tuple[_Group, GroupMemory]:
    """Measures the demand of a role's pools; `pools` learns how their backlogs stand."""
    unit = units({name: _speed(pools[name].capacity, limits.pools[name]) for name in names})
    demands: dict[str, Demand] = {}
    ready = held = 0.0
    for name in names:
        view, its = seen.pools[name], pools[name]
        if view.signals is None:
            continue
        stands = backlog(known(view.signals, settings), seen.now)
        demands[name] = measure(
            view.signals,
            its.capacity,
            limits.pools[name],
            settings,
            growth_tokens_per_s=its.backlog.growth(stands),
            cold_start_s=its.cold_start.seconds,
            parked=_parked(role, seen, settings),
        )
        pools[name] = replace(its, backlog=stands)
        ready += unit[name] * sum(r.ready and not r.cordoned for r in view.signals.replicas)
        held += view.signals.held
    its_memory = memory.groups.get(role, GroupMemory())
    total = sum(demand.replicas * unit[name] * pools[name].correction.factor for name, demand in demands.items())
    samples = kept((*its_memory.demand, (seen.now, total)), seen.now - settings.stable_window_s) if demands else its_memory.demand
    busy = held or any(not demand.idle for demand in demands.values()) or its_memory.busy_at is None or not demands
    busy_at = seen.now if busy else its_memory.busy_at
    stable, panic = (mean(samples, seen.now - span) for span in (settings.stable_window_s, settings.panic_window_s))
    panic_until = its_memory.panic_until
    if demands and panic >= settings.panic_threshold * max(ready, min(unit.values())):
        panic_until = seen.now + settings.stable_window_s
    group = _Group(
        role=role,
        names=names,
        unit=unit,
        demands=demands,
        ready=ready,
        asked=sum(unit[name] * (seen.pools[name].replicas - _stuck(name, seen, pools, settings)) for name in names),
        stable=stable,
        panic=panic,
        panicking=seen.now < panic_until,
        idle_s=seen.now - (busy_at if busy_at is not None else seen.now),
        held=int(held),
    )
    return group, GroupMemory(samples, panic_until, busy_at)


def _stuck(name: str, seen: Observation, pools: Mapping[str, PoolMemory], settings: Settings) -> int:
    return pools[name].cold_start.stuck(seen.pools[name].starting, settings.cold_start_factor)


def _speed(capacity: Capacity, limits: Limits) -> float:
    """Return the speed that ranks pools of one role: the speed of the work that the role does."""
    itl_s = limits.goals.itl_s if limits.goals else None
    return capacity.prefill_tokens_per_s if limits.role != "Decode" else capacity.output_tokens_per_s(itl_s)


def _parked(role: Role, seen: Observation, settings: Settings) -> int:
    """Requests at decode replicas that wait for KV from prefill ones: theirs to answer for."""
    if role != "Prefill":
        return 0
    signals = [view.signals for view in seen.pools.values() if view.signals is not None]
    return sum(r.num_requests_waiting.get("remote_kv", 0) for its in signals for r in known(its, settings).values())


def _wanted(
    group: _Group, seen: Observation, limits: ModelLimits, settings: Settings, pools: Mapping[str, PoolMemory]
) -> dict[str, int]:
    """What demand asks for, before the user's bounds: the shares of the pools, and what each keeps warm or was told to expect.

    Where replicas of a pool do not start, the others carry their share until they do.
    """
    demand, wakes = group.demand, list[str]()
    for name in group.names:
        its = limits.pools[name]
        asleep = its.scale_to_zero_after_s is not None and group.idle_s >= its.scale_to_zero_after_s and not group.held
        if not asleep:
            wakes.append(name)
    # Where all sleep, what is left of rates and means fades for minutes, and is no work.
    demand = max(demand, min(group.unit[name] for name in group.names) * 0.01) if wakes else 0.0
    offers = [_offer(name, group, limits.pools[name]) for name in group.names]
    if len(offers) == 1:
        offers = [replace(offers[0], least=0)]  # which bound counts is told later
    last = max(offers, key=lambda offer: (offer.price, offer.name))
    last = replace(last, most=UNBOUNDED)
    offers = [last if offer.name == last.name else offer for offer in offers]
    short: list[Offer] = []
    for offer in offers:
        stuck = _stuck(offer.name, seen, pools, settings)
        short.append(
            replace(offer, most=max(seen.pools[offer.name].replicas - stuck, offer.least))
            if stuck and offer is not last
            else offer
        )
    ideal, now = allocate(demand, offers), allocate(demand, short)
    return {name: max(ideal[name], now[name]) + limits.pools[name].warm for name in group.names}


def _offer(name: str, group: _Group, limits: Limits) -> Offer:
    return Offer(name, group.unit[name], limits.cost, limits.min_replicas, limits.max_replicas)


def _recommend(memory: PoolMemory, wanted: int, seen: Observation, limits: Limits, name: str) -> PoolMemory:
    return replace(
        memory,
        recommended=kept((*memory.recommended, (seen.now, wanted)), seen.now - limits.down_window_s),
        sizes=kept((*memory.sizes, (seen.now, seen.pools[name].replicas)), seen.now - limits.up_period_s),
    )


def _case(
    name: str,
    wanted: int,
    group: _Group,
    seen: Observation,
    limits: ModelLimits,
    settings: Settings,
    memory: PoolMemory,
    everything: Memory,
) -> Case:
    """All that the pool's bounds depend on."""
    view, its, cold = seen.pools[name], limits.pools[name], memory.cold_start
    warm = sum(limits.pools[other].warm * group.unit[other] for other in group.names)
    stuck = _stuck(name, seen, {name: memory}, settings)
    return Case(
        size=view.replicas,
        wanted=wanted,
        scheduled=min(floor(its.schedule, seen.wall, cold.seconds), its.max_replicas),
        limits=its,
        settings=settings,
        demand=group.demands.get(name),
        group_demand=group.demand,
        short=group.demand + warm - group.asked > settings.tolerance * group.asked,
        factor=memory.correction.factor,
        held=group.held,
        panic_s=settings.stable_window_s if group.panicking else 0.0,
        no_gateway=view.signals is None or not view.signals.complete,
        blind=seen.now - (seen.now if memory.clear_at is None else memory.clear_at) > settings.stale_after_s,
        young=len(view.starting) - stuck,
        stuck=stuck,
        cold_start_s=cold.seconds,
        highest=max((count for _, count in memory.recommended), default=wanted),
        watched_s=seen.now - (seen.now if everything.started_at is None else everything.started_at),
        base=min((count for _, count in memory.sizes), default=view.replicas),
    )


def _together(
    decisions: dict[str, Decision], groups: list[_Group], seen: Observation, limits: ModelLimits
) -> dict[str, Decision]:
    """The bounds that the pools share: the quotient of prefill to decode, then the budget."""
    members = {
        name: Member(
            name,
            group.role,
            _offer(name, group, limits.pools[name]),
            decisions[name].replicas,
            seen.pools[name].replicas,
        )
        for group in groups
        for name in group.names
    }
    if limits.prefill_per_decode is not None:
        sides = [[member for member in members.values() if member.group == role] for role in ("Prefill", "Decode")]
        low, high = limits.prefill_per_decode
        for name, count in balance(sides[0], sides[1], limits.prefill_per_decode).items():
            if count != decisions[name].replicas:
                why = f"; prefill to decode is to be {low:.2f} to {high:.2f}"
                decisions[name] = replace(
                    decisions[name], replicas=count, constraint="Ratio", reason=decisions[name].reason + why
                )
                members[name] = replace(members[name], wanted=count)
    bounds = [(it, words) for it, words in ((limits.budget, "the budget is"), (limits.room, _ROOM)) if it is not None]
    if bounds:
        bound, words = min(bounds)
        for name, count in afford(list(members.values()), bound).items():
            if count != decisions[name].replicas:
                why = f"; {words} {bound:g}, which allows {count}"
                decisions[name] = replace(
                    decisions[name], replicas=count, constraint="Budget", reason=decisions[name].reason + why
                )
    return decisions


def _correct(
    name: str,
    memory: PoolMemory,
    decision: Decision,
    groups: list[_Group],
    seen: Observation,
    limits: ModelLimits,
    settings: Settings,
) -> PoolMemory:
    """Compares what clients get with what they are promised."""
    goals, view = limits.pools[name].goals, seen.pools[name]
    (group,) = (group for group in groups if name in group.names)
    if goals is None:  # what was corrected for a goal that is gone or out of reach must not stay
        return replace(memory, correction=Correction())
    if view.signals is None or name not in group.demands:
        return memory
    grown = any(count < view.replicas for _, count in memory.sizes)
    looked = Seen(seen.now, view.signals.ttft_counts, _itl_late(view.signals, settings, goals.itl_s))
    corrected = memory.correction.observe(
        looked,
        goals,
        settled=not view.starting and not grown and decision.replicas <= view.replicas,
        filled=decision.replicas > limits.pools[name].min_replicas,
        pause_s=max(settings.stable_window_s, memory.cold_start.seconds),
    )
    return replace(memory, correction=corrected)


def _itl_late(signals: PoolSignals, settings: Settings, itl_s: float | None) -> float:
    """Share of the running requests at replicas whose tokens come later than promised; prefills between them included."""
    if itl_s is None:
        return 0.0
    late = total = 0
    for report in known(signals, settings).values():
        busy = report.prompt_tokens_per_s / report.prefill_tokens_per_s if report.prefill_tokens_per_s else 0.0
        step = report.decode_step_s / max(1 - busy, 0.05)
        total += report.num_requests_running
        late += report.num_requests_running if step > itl_s else 0
    return late / total if total else 0.0
