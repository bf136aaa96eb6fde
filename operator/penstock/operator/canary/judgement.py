"""Whether a canary does worse than the model whose traffic it shares. Pure.

Bad is what chance does not explain: a figure that lies beyond its limit by more than `DOUBT` standard errors. Good is a figure
within its limit. In between, and with too few requests, nothing is said, and more requests decide. So one figure near its limit
does not make the verdict change back and forth, and a caller can ask for it at any time.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Final, Literal

from penstock.api.resources import Judge
from penstock.operator.canary.tally import Tally

DOUBT: Final = 3.0
"""Standard errors; a look every few seconds must not find by chance what is not there."""


Outcome = Literal["Good", "Bad", "Open"]


@dataclass(frozen=True)
class Limits:
    """How much worse a canary may be."""

    min_requests: int
    error_share: float
    """Largest allowed excess of the canary's share of failures, 0 to 1."""
    ttft_ratio: float | None = None
    """Largest allowed ratio of the canary's time to the first token to the other model's, at least 1. None: not judged."""
    ttft_share: float = 0.95
    """The percentile of that time, 0 to 1."""


@dataclass(frozen=True)
class Judgement:
    """What the figures say."""

    outcome: Outcome
    figures: str
    """The figures of both models, in a sentence."""


_WEIGHTIEST: Final[tuple[Outcome, ...]] = ("Bad", "Open", "Good")


def limits_of(judge: Judge) -> Limits:
    """Return the limits that the spec sets."""
    ratio = judge.max_ttft_percent
    return Limits(
        min_requests=judge.min_requests,
        error_share=judge.max_error_points / 100,
        ttft_ratio=None if ratio is None else ratio / 100,
        ttft_share=judge.ttft_percentile / 100,
    )


def compare(canary: Tally, stable: Tally, limits: Limits) -> Judgement:
    """The canary against the model whose traffic it shares, both over the same time."""
    outcomes: list[Outcome] = [_errors(canary, stable, limits)]
    if limits.ttft_ratio is not None:
        outcomes.append(_ttft(canary, stable, limits, limits.ttft_ratio))
    return Judgement(min(outcomes, key=_WEIGHTIEST.index), figures(canary, stable, limits))


def _errors(canary: Tally, stable: Tally, limits: Limits) -> Outcome:
    if min(canary.requests, stable.requests) < limits.min_requests:
        return "Open"
    excess = canary.failed_share - stable.failed_share - limits.error_share
    if excess > DOUBT * sqrt(_variance(canary) + _variance(stable)):
        return "Bad"
    return "Good" if excess <= 0 else "Open"


def _variance(of: Tally) -> float:
    """Variance of the share of failures, with one failure and one success added (Agresti and Caffo, 2000): no failure among few
    requests is no certainty."""
    share = (of.failures + 1) / (of.requests + 2)
    return share * (1 - share) / (of.requests + 2)


def _ttft(canary: Tally, stable: Tally, limits: Limits, ratio: float) -> Outcome:
    """Judge the share of the canary's first tokens that come later than allowed, with the standard error of that share."""
    seen = min(canary.first_tokens, stable.first_tokens)
    if seen < limits.min_requests:
        return "Open"
    allowed = 1 - limits.ttft_share
    excess = canary.later_than(stable.ttft_s(limits.ttft_share) * ratio) - allowed
    if excess > DOUBT * sqrt(allowed * (1 - allowed) * (1 / canary.first_tokens + 1 / stable.first_tokens)):
        return "Bad"
    return "Good" if excess <= 1e-9 else "Open"


def figures(canary: Tally, stable: Tally, limits: Limits) -> str:
    """What both did, and what is lacking."""
    said = f"{canary.failed_share:.1%} of its {canary.requests} requests failed, "
    said += f"{stable.failed_share:.1%} of {stable.requests} there"
    if limits.ttft_ratio is not None:
        percentile = f"p{limits.ttft_share * 100:.0f}"
        said += f"; {percentile} time to the first token {_time(canary, limits)}, {_time(stable, limits)} there"
    return said


def _time(of: Tally, limits: Limits) -> str:
    return f"{of.ttft_s(limits.ttft_share):.3g} s of {of.first_tokens}" if of.first_tokens else "unknown (no streamed answers)"
