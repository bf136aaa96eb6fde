"""Series that are computed in advance: what alerts and dashboards ask for again and again."""

from typing import Final

from monitoring.queries import rate, total
from monitoring.rules import Group, Recording
from penstock.api import metrics

SLOW_S: Final = "2.5"
"""An edge of the buckets, so that the share of slower requests is counted, not estimated."""
WINDOWS: Final = ("5m", "30m", "1h", "6h")
MODEL: Final = "namespace, model"


def error_ratio(window: str) -> str:
    """The name of the share of requests that failed by our fault; of one that was reset, it may be the client who left."""
    return f"model:{metrics.MODEL_REQUESTS}:error_ratio_rate{window}"


def slow_ratio(window: str) -> str:
    """The name of the share of good requests whose first token came after more than `SLOW_S`."""
    return f"model:{metrics.RESPONSE_SECONDS}:slow_ratio_rate{window}"


HIT_RATIO: Final = f"model:{metrics.PREFIX_CACHE_HITS}:ratio_rate10m"
WAITING: Final = f"model:{metrics.NUM_REQUESTS_WAITING}:sum"
COST: Final = f"model:{metrics.PROMPT_TOKENS}:replica_seconds_per_computed_token_rate5m"


def _errors(window: str) -> str:
    every = rate(metrics.MODEL_REQUESTS, by="model", window=window)
    bad = rate(metrics.MODEL_REQUESTS, 'code=~"5.."', by="model", window=window)
    return f"({bad} or 0 * {every}) / {every}"  # a model without a failed request has no series of them


def _slow(window: str) -> str:
    name = metrics.RESPONSE_SECONDS
    good = rate(name, f'le="{SLOW_S}"', by="model", window=window, part="_bucket")
    return f"1 - {good} / {rate(name, by='model', window=window, part='_count')}"


_hits, _queries = (rate(it, by=MODEL, window="10m") for it in (metrics.PREFIX_CACHE_HITS, metrics.PREFIX_CACHE_QUERIES))
_computed = rate(metrics.PROMPT_TOKENS, 'source="computed"', by=MODEL, window="5m")

RECORDINGS: Final = Group(
    "penstock.recordings",
    [
        *(Recording(error_ratio(window), _errors(window)) for window in WINDOWS),
        *(Recording(slow_ratio(window), _slow(window)) for window in WINDOWS),
        Recording(HIT_RATIO, f"{_hits} / {_queries}"),
        Recording(WAITING, total(metrics.NUM_REQUESTS_WAITING, by=MODEL)),
        Recording(COST, f"count by ({MODEL}) ({metrics.KV_CACHE_USAGE}) / {_computed}"),
    ],
)
