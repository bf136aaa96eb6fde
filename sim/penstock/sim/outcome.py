"""What a run was worth."""

import msgspec
import numpy as np

from penstock.sim.replica import Running


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """What a client is promised: goodput counts the requests that got both."""

    ttft_s: float = 2.0
    itl_s: float = 0.05
    """Mean time between an answer's tokens."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run; times in seconds."""

    requests: int
    hit_rate: float
    """Share of prompt tokens that prefix caches supplied."""
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    goodput: float
    """Share of requests within the SLO."""
    balance: float
    """Busiest replica's work over the mean: prompt tokens computed and tokens sampled, weighed by their time."""
    preemptions: int
    makespan_s: float
    """Seconds from the first arrival to the last token."""


def outcome(finished: list[list[Running]], preemptions: int, slo: Slo, prefill_token_s: float, output_token_s: float) -> Outcome:
    """The figures of all requests, given by replica.

    Args:
        finished: Of each replica.
        preemptions: Of all.
        slo: For goodput.
        prefill_token_s: Weight of a computed prompt token in the balance.
        output_token_s: Weight of a sampled token.
    """
    everything = [running for replica in finished for running in replica]
    ttft = np.array([r.first_token - r.arrived for r in everything])
    gaps = np.array([(r.finished - r.first_token) / max(r.request.output_tokens - 1, 1) for r in everything])
    prompt = sum(r.request.prompt_tokens for r in everything)
    work = [
        sum(
            (r.request.prompt_tokens - r.hit_tokens) * prefill_token_s + r.request.output_tokens * output_token_s for r in replica
        )
        for replica in finished
    ]
    return Outcome(
        requests=len(everything),
        hit_rate=sum(r.hit_tokens for r in everything) / prompt,
        ttft_p50=float(np.percentile(ttft, 50)),
        ttft_p90=float(np.percentile(ttft, 90)),
        ttft_p99=float(np.percentile(ttft, 99)),
        itl_p50=float(np.percentile(gaps, 50)),
        itl_p99=float(np.percentile(gaps, 99)),
        goodput=float(np.mean((ttft <= slo.ttft_s) & (gaps <= slo.itl_s))),
        balance=max(work) / (sum(work) / len(work)),
        preemptions=preemptions,
        makespan_s=max(r.finished for r in everything) - min(r.arrived for r in everything),
    )
