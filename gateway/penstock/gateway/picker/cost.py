"""The cost of sending a request to a replica, in seconds.

The estimate is the time to the first token (queue, capacity, prefill of what is not resident there, recompute by preemption)
plus a horizon of tokens at the inter-token time that the request would see. Load that is not known is not read as no load: as a
report ages, its figures fade into what the other replicas of the model show, with a floor.
"""

from collections.abc import Iterable, Sequence
from statistics import fmean, median

import msgspec

from penstock.api.load_report import LoadReport
from penstock.gateway.picker.candidates import Candidate
from penstock.gateway.picker.request import RequestView

PRIOR_PREFILL_TOKENS_PER_S = 2_000.0
PRIOR_STEP_S = 0.03
PRIOR_QUEUE_S = 0.25
"""Queue of a replica of which nothing is known, at least."""
GRACE_S = 2.0
"""A replica that answers is heard at least this often (the stream, or the poll that replaces it), so up to here a report is as
good as new."""
HALF_LIFE_S = 5.0
HORIZON_TOKENS = 32
"""How many output tokens' inter-token time counts as much as the time to the first."""
OUTPUT_TOKENS = 256
"""Assumed length of the answers that must end before a full replica has room."""
ROWS_PER_STEP = 16.0
"""Decode rows that double the time of a step of one row: between a GPU, where steps hardly grow, and a CPU."""
KV_CLIFF = 0.9
"""KV usage from which preemption threatens, rising to certainty at 1."""


class Rates(msgspec.Struct, frozen=True):
    """What the candidates of one pick show together: stands in for what one of them has not measured."""

    prefill_tokens_per_s: float = PRIOR_PREFILL_TOKENS_PER_S
    step_s: float = PRIOR_STEP_S
    queue_s: float = PRIOR_QUEUE_S


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """What one candidate would cost, by cause; all in seconds."""

    queue_s: float
    """Prefill that the replica reports as still to do."""
    booked_s: float
    """Prefill of requests sent there that it has not reported yet."""
    capacity_s: float
    """Waiting for rows or KV blocks."""
    prefill_s: float
    """This request's tokens that are not resident."""
    preemption_s: float
    """Expected recompute, where KV memory is nearly full."""
    uncertainty_s: float
    """Queue assumed in place of what the report is too old to say."""
    itl_s: float
    """Inter-token time with this request in the batch."""

    @property
    def ttft_s(self) -> float:
        """Estimated time to the first token."""
        return self.queue_s + self.booked_s + self.capacity_s + self.prefill_s + self.preemption_s + self.uncertainty_s

    def cost_s(self, max_tokens: int | None) -> float:
        """What is minimised: time to the first token and a horizon of inter-token times."""
        horizon = HORIZON_TOKENS if max_tokens is None else min(HORIZON_TOKENS, max_tokens)
        return self.ttft_s + horizon * self.itl_s


def trust(candidate: Candidate) -> float:
    """How much of a report still counts, 0 to 1, by its age; 0 without one."""
    if candidate.report is None:
        return 0.0
    return 0.5 ** (max(candidate.report_age_s - GRACE_S, 0.0) / HALF_LIFE_S)


def common_rates(candidates: Sequence[Candidate]) -> Rates:
    """The rates that the candidates have measured, as medians; priors where none has."""
    reports = [candidate.report for candidate in candidates if candidate.report is not None]
    prefill = _median((r.prefill_tokens_per_s for r in reports), PRIOR_PREFILL_TOKENS_PER_S)
    step = _median((r.decode_step_s for r in reports), PRIOR_STEP_S)
    fresh = [c.report for c in candidates if c.report is not None and c.report_age_s <= GRACE_S]
    queues = [r.prefill_backlog_tokens / _prefill_rate(r, prefill) for r in fresh]
    return Rates(prefill, step, max(PRIOR_QUEUE_S, fmean(queues) if queues else 0.0))


def _median(values: Iterable[float], prior: float) -> float:
    measured = [value for value in values if value > 0]
    return median(measured) if measured else prior


def _prefill_rate(report: LoadReport | None, otherwise: float) -> float:
    """Tokens a second; below one, no measurement is one."""
    return max((report.prefill_tokens_per_s if report else 0.0) or otherwise, 1.0)


def estimate(request: RequestView, candidate: Candidate, rates: Rates) -> Estimate:
    """The cost of `request` at `candidate`."""
    report, booked = candidate.report, candidate.booked
    trusted = trust(candidate)
    rate = _prefill_rate(report, rates.prefill_tokens_per_s)
    step = (report.decode_step_s if report else 0.0) or rates.step_s
    fresh_tokens = request.prompt_tokens - candidate.resident_tokens
    blocks = -(-(booked.prefill_tokens + fresh_tokens) // request.block_size)
    running = report.num_requests_running if report else 0
    after = trusted * running + booked.requests + 1
    return Estimate(
        queue_s=trusted * (report.prefill_backlog_tokens if report else 0) / rate,
        booked_s=booked.prefill_tokens / rate,
        capacity_s=trusted * _capacity_s(candidate, blocks, step),
        prefill_s=fresh_tokens / rate,
        preemption_s=trusted * _preemption_s(candidate, blocks, request.block_size, rate),
        uncertainty_s=(1 - trusted) * rates.queue_s,
        itl_s=step * (ROWS_PER_STEP + after) / (ROWS_PER_STEP + max(running, 1)),
    )


def _capacity_s(candidate: Candidate, blocks: int, step: float) -> float:
    """Seconds until rows and KV blocks are free, if answers of average length end one after another."""
    report = candidate.report
    if report is None:
        return 0.0
    ahead = report.waiting + candidate.booked.requests
    short = 0
    if report.max_num_seqs:
        short = report.num_requests_running + ahead + 1 - report.max_num_seqs
    if report.kv_blocks_total and (blocks > report.kv_blocks_reclaimable or report.num_requests_waiting.get("capacity")):
        short = max(short, ahead + 1)
    return max(short, 0) * OUTPUT_TOKENS * step / max(report.num_requests_running, 1)


def _preemption_s(candidate: Candidate, blocks: int, block_size: int, rate: float) -> float:
    """Seconds of prefill that a preemption would repeat, by how likely this request brings one about."""
    report = candidate.report
    if report is None or not report.kv_blocks_total or not report.num_requests_running:
        return 0.0
    usage = report.kv_cache_usage_perc + blocks / report.kv_blocks_total
    risk = min(max((usage - KV_CLIFF) / (1 - KV_CLIFF), 0.0), 1.0)
    held = report.kv_cache_usage_perc * report.kv_blocks_total * block_size / report.num_requests_running
    return risk * held / rate
