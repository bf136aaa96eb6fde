"""Picks made of plain candidates, for tests: the columns of them, and a slow scalar reference of every policy."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, inf
from statistics import fmean, median

import numpy as np

from penstock.api.fleet import Replica
from penstock.api.load_report import LoadReport
from penstock.gateway.picker.candidates import Booked, ReplicaKey, key_of
from penstock.gateway.picker.choice import Choice, choose
from penstock.gateway.picker.columns import ARRIVALS_S, Columns
from penstock.gateway.picker.cost import HORIZON_TOKENS
from penstock.gateway.picker.figures import PRIOR_OUTPUT_TOKENS, PRIOR_PREFILL_TOKENS_PER_S, PRIOR_QUEUE_S, PRIOR_STEP_S
from penstock.gateway.picker.outliers import Standing
from penstock.gateway.picker.price import CROWDING, EVICTION, GRACE_S, HALF_S, KV_CLIFF, ROWS_PER_STEP
from penstock.gateway.picker.request import Prompt, RequestView
from penstock.gateway.picker.slate import Slate, slate_of

POOL = "default/m/p"
NOW = 1000.0


@dataclass(frozen=True)
class Known:
    """One replica and all that is known of it."""

    at: int
    report: LoadReport | None = None
    report_age_s: float = 0.0
    booked: Booked = field(default_factory=Booked)
    resident_tokens: int = 0
    last_resort: bool = False
    pool: str = POOL
    ready: bool = True

    @property
    def replica(self) -> Replica:
        return replica(self.at, ready=self.ready, pool=self.pool)

    @property
    def key(self) -> ReplicaKey:
        return key_of(self.replica)

    @property
    def name(self) -> str:
        return self.replica.name


def replica(at: int, *, ready: bool = True, terminating: bool = False, cordoned: bool = False, pool: str = POOL) -> Replica:
    return Replica(
        uid=f"uid-{at}",
        name=f"m-p-{at}",
        pool=pool,
        host=f"10.0.0.{at}",
        port=8000,
        events_port=5557,
        replay_port=5558,
        ready=ready,
        terminating=terminating,
        cordoned=cordoned,
    )


def report(**fields: object) -> LoadReport:
    defaults = {
        "epoch": 1,
        "seq": 1,
        "max_num_seqs": 64,
        "kv_blocks_total": 1000,
        "kv_blocks_reclaimable": 1000,
        "prefill_tokens_per_s": 1000.0,
        "decode_step_s": 0.01,
    }
    return LoadReport(**{**defaults, **fields})


def request(tokens: int = 400, ident: str = "r", **fields: object) -> RequestView:
    return RequestView(id=ident, path="/v1/completions", model="m", prompts=(Prompt(tokens),), **fields)


def columns_of(fleet: Sequence[Known], sent: int = 0) -> Columns:
    """`sent`: requests that went to the fleet a second ago."""
    columns = Columns()
    columns.update([known.replica for known in fleet])
    columns.rates(NOW - 1)
    for _ in range(sent):
        columns.sent()
    for row, known in enumerate(fleet):
        if known.report is not None:
            columns.report(row, known.report, NOW - known.report_age_s)
        columns.booked(row, known.booked)
        if known.last_resort:
            columns.stand(row, Standing(NOW + 1, inf))
    return columns


def arrivals(fleet: Sequence[Known], sent: int) -> float:
    """Requests a second and replica, where so many came a second ago."""
    return sent * exp(-1 / ARRIVALS_S) / ARRIVALS_S / max(sum(known.ready for known in fleet), 1)


def slate(fleet: Sequence[Known], asked: RequestView | None = None, turn: int = 0, sent: int = 0) -> Slate:
    columns = columns_of(fleet, sent)
    resident = np.array([float(known.resident_tokens) for known in fleet])
    return slate_of(asked or request(), columns, columns.open, resident, NOW, turn)


def pick(
    fleet: Sequence[Known], policy: str = "Cost", ident: str = "r", tokens: int = 400, turn: int = 0, sent: int = 0
) -> Choice:
    return choose(slate(fleet, request(tokens, ident), turn, sent), policy)


# --- the reference: one replica at a time, in plain Python ---


def scores(fleet: Sequence[Known], asked: RequestView, policy: str, turn: int, sent: int = 0) -> dict[ReplicaKey, float]:
    """What each policy that draws no lots makes of the replicas."""
    match policy:
        case "Cost":
            return {known.key: sum(cost(fleet, known, asked, sent).values()) for known in fleet}
        case "LeastRequest":
            return {known.key: _requests(fleet, known) for known in fleet}
        case "RoundRobin":
            order = sorted(known.name for known in fleet)
            return {known.key: (order.index(known.name) - turn) % len(fleet) for known in fleet}
        case "WeightedScore":
            return {known.key: _weighted(known, asked) for known in fleet}
        case _:
            raise ValueError(policy)


def cost(fleet: Sequence[Known], known: Known, asked: RequestView, sent: int = 0) -> dict[str, float]:
    """The terms of the cost; the inter-token time times its horizon."""
    reports = [other.report for other in fleet if other.report is not None]
    common_rate = median([r.prefill_tokens_per_s for r in reports if r.prefill_tokens_per_s] or [PRIOR_PREFILL_TOKENS_PER_S])
    common_step = median([r.decode_step_s for r in reports if r.decode_step_s] or [PRIOR_STEP_S])
    fresh_reports = [k.report for k in fleet if k.report is not None and k.report_age_s <= GRACE_S]
    fresh_ages = [k.report_age_s for k in fleet if k.report is not None and k.report_age_s <= GRACE_S]
    queues = [
        max(r.prefill_backlog_tokens / max(r.prefill_tokens_per_s or common_rate, 1.0) - age, 0.0)
        for r, age in zip(fresh_reports, fresh_ages, strict=True)
    ]
    common_queue = fmean(queues) if queues else PRIOR_QUEUE_S
    paces = [_pace(r.decode_step_s or common_step, r.num_requests_running, 0) for r in fresh_reports]
    common_pace = fmean(paces) if paces else common_step
    if known.report is None:
        common_queue = max(common_queue, PRIOR_QUEUE_S)

    r = known.report
    rate = max((r.prefill_tokens_per_s if r else 0.0) or common_rate, 1.0)
    step = (r.decode_step_s if r else 0.0) or common_step
    trust = 1 / (1 + (max(known.report_age_s - GRACE_S, 0.0) / HALF_S) ** 2) if r else 0.0
    fresh = asked.prompt_tokens - known.resident_tokens
    tokens = known.booked.prefill_tokens + fresh
    running = r.num_requests_running if r else 0
    capacity = preemption = 0.0
    if r is not None:
        held = r.kv_cache_usage_perc * r.kv_blocks_total / running if running else 0.0
        short = 0.0
        if r.max_num_seqs:
            short = running + r.waiting + known.booked.requests + 1 - r.max_num_seqs
        if r.kv_blocks_total:
            missing = (r.prefill_backlog_tokens + tokens) / asked.block_size - r.kv_blocks_reclaimable
            short = max(short, missing / max(held, 1.0))
        capacity = max(short, 0.0) * PRIOR_OUTPUT_TOKENS * step / max(running, 1)
        if r.kv_blocks_total:
            growing = running / 2 + r.waiting + known.booked.requests + 1
            room = r.kv_blocks_total * asked.block_size
            beyond = r.kv_cache_usage_perc + (tokens + PRIOR_OUTPUT_TOKENS * growing) / room - KV_CLIFF
            preemption = max(beyond, 0.0) * room / rate
    assumed = common_pace * (ROWS_PER_STEP + known.booked.requests + 1) / (ROWS_PER_STEP + 1)
    itl = trust * _pace(step, running, known.booked.requests) + (1 - trust) * assumed
    horizon = HORIZON_TOKENS if asked.max_tokens is None else min(HORIZON_TOKENS, asked.max_tokens)
    first_token = {
        "queue_s": trust * max((r.prefill_backlog_tokens if r else 0) / rate - known.report_age_s, 0.0),
        "booked_s": known.booked.prefill_tokens / rate,
        "capacity_s": trust * capacity,
        "prefill_s": fresh / rate,
        "lora_s": 0.0,
        "encoder_s": 0.0,
        "preemption_s": trust * preemption,
        "uncertainty_s": (1 - trust) * common_queue,
    }
    others = {
        "eviction_s": EVICTION * fresh / rate,
        "crowding_s": CROWDING * arrivals(fleet, sent) * fresh / max(common_rate, 1.0) * sum(first_token.values()),
    }
    return {**first_token, **others, "itl": horizon * itl}


def _pace(step: float, running: int, booked: int) -> float:
    return step * (ROWS_PER_STEP + running + booked + 1) / (ROWS_PER_STEP + max(running, 1))


def _requests(fleet: Sequence[Known], known: Known) -> float:
    reported = [k.report.num_requests_running + k.report.waiting for k in fleet if k.report is not None]
    unknown = (fmean(reported) if reported else 0.0) + 1
    own = known.report
    return (own.num_requests_running + own.waiting if own else unknown) + known.booked.requests


def _weighted(known: Known, asked: RequestView) -> float:
    r = known.report
    rows = (r.max_num_seqs if r else 0) or 256
    queue = min(((r.waiting if r else rows / 2) + known.booked.requests) / rows, 1.0)
    usage = r.kv_cache_usage_perc if r else 0.5
    return 2 * queue + 2 * usage - 3 * known.resident_tokens / max(asked.prompt_tokens, 1)
