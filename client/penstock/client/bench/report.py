"""Summary figures of a run's records. `docs/bench.md` states the formulae."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from penstock.client.bench.records import Record

METRICS: Final = ("ttft", "tpot", "itl", "e2el", "icl")
"""Time to first token, time per output token, inter-token latency, end-to-end latency, inter-chunk latency."""
BOUNDS: Final = ("ttft", "tpot", "e2el")
"""Metrics that a request has one of, so that goodput may bound them."""


@dataclass(frozen=True)
class Cost:
    """What the tokens were made with.

    Args:
        devices: Accelerators behind the server.
        per_device_hour: Price of one for an hour in any currency; None: not known.
    """

    devices: int
    per_device_hour: float | None = None


@dataclass(frozen=True)
class Distribution:
    """Samples of one metric, in milliseconds."""

    count: int
    mean: float
    median: float
    std: float
    percentiles: dict[float, float]

    @staticmethod
    def of(seconds: Sequence[float], percentiles: Sequence[float]) -> "Distribution | None":
        """None without samples: no number is made up."""
        if not seconds:
            return None
        ms = np.asarray(seconds) * 1000
        points = np.percentile(ms, [50.0, *percentiles]).tolist()
        return Distribution(
            len(ms), float(ms.mean()), points[0], float(ms.std()), dict(zip(percentiles, points[1:], strict=True))
        )


@dataclass(frozen=True)
class Report:
    """The numbers of a run. Tokens and latencies are those of complete answers."""

    duration: float
    """Seconds from the first request sent to the end of the last answer."""
    completed: int
    errors: dict[str, int]
    """Failed requests by kind of error."""
    input_tokens: int
    cached_tokens: int | None
    """Prompt tokens from the server's prefix cache. None: the server does not report them."""
    output_tokens: int
    chunks: int
    uncounted: int
    """Answers whose tokens the server did not count, so that chunks were taken for tokens."""
    good: int | None
    """Answers that met every bound of the goodput; None: no bound was given."""
    latencies: dict[str, Distribution]
    lateness: Distribution | None
    """How much later than meant requests were sent."""
    cost: Cost

    @property
    def request_throughput(self) -> float:
        """Answers a second."""
        return self.completed / self.duration

    @property
    def output_throughput(self) -> float:
        """Output tokens a second."""
        return self.output_tokens / self.duration

    @property
    def input_throughput(self) -> float:
        """Prompt tokens a second."""
        return self.input_tokens / self.duration

    @property
    def goodput(self) -> float | None:
        """Good answers a second."""
        return None if self.good is None else self.good / self.duration

    @property
    def output_tokens_per_device_second(self) -> float:
        """MET-14's unit."""
        return self.output_throughput / self.cost.devices

    @property
    def cost_per_million_output_tokens(self) -> float | None:
        """All devices for the whole run, over the output alone; None without a price or without output."""
        if self.cost.per_device_hour is None or not self.output_tokens:
            return None
        return self.cost.per_device_hour / 3600 / self.output_tokens_per_device_second * 1e6

    def to_json(self) -> dict[str, Any]:
        """Flat, with the names of `vllm bench serve` where it has the number too."""
        document: dict[str, Any] = {
            "duration": self.duration,
            "completed": self.completed,
            "failed": sum(self.errors.values()),
            "errors_by_kind": self.errors,
            "total_input_tokens": self.input_tokens,
            "total_cached_tokens": self.cached_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": self.request_throughput,
            "input_throughput": self.input_throughput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.input_throughput + self.output_throughput,
            "request_goodput": self.goodput,
            "tokens_per_chunk": self.output_tokens / self.chunks if self.chunks else None,
            "answers_without_usage": self.uncounted,
            "num_devices": self.cost.devices,
            "output_tokens_per_device_second": self.output_tokens_per_device_second,
            "cost_per_device_hour": self.cost.per_device_hour,
            "cost_per_million_output_tokens": self.cost_per_million_output_tokens,
        }
        named = dict(self.latencies) | ({"lateness": self.lateness} if self.lateness else {})
        for name, values in named.items():
            document |= {f"mean_{name}_ms": values.mean, f"median_{name}_ms": values.median, f"std_{name}_ms": values.std}
            document |= {f"p{percentile:g}_{name}_ms": value for percentile, value in values.percentiles.items()}
        return document


def summarize(
    records: Sequence[Record], duration: float, percentiles: Sequence[float], bounds: Mapping[str, float], cost: Cost
) -> Report:
    """The numbers of a run.

    Args:
        records: Of every request, failed ones too.
        duration: Seconds, above 0.
        percentiles: 0 to 100; interpolated linearly between samples.
        bounds: For the goodput: ms by name of `BOUNDS`. Empty: no goodput.
        cost: For tokens a device-second and the price of a million.
    """
    complete = [record for record in records if record.error is None]
    samples: dict[str, list[float]] = {
        "ttft": [record.ttft for record in complete],
        "tpot": [tpot for record in complete if (tpot := record.tpot) is not None],
        "itl": [gap for record in complete for gap in record.itls()],
        "e2el": [record.e2el for record in complete],
        "icl": [gap for record in complete for gap in record.icls()],
    }
    named = {name: Distribution.of(values, percentiles) for name, values in samples.items()}
    cached = [record.cached_tokens for record in complete if record.cached_tokens is not None]
    return Report(
        duration=duration,
        completed=len(complete),
        errors=dict(Counter(record.error for record in records if record.error is not None).most_common()),
        input_tokens=sum(record.prompt_tokens for record in complete),
        cached_tokens=sum(cached) if cached else None,
        output_tokens=sum(record.output_tokens for record in complete),
        chunks=sum(len(record.stamps) for record in complete),
        uncounted=sum(not record.counted for record in complete),
        good=sum(is_good(record, bounds) for record in complete) if bounds else None,
        latencies={name: values for name, values in named.items() if values is not None},
        lateness=Distribution.of([record.sent - record.due for record in records], percentiles),
        cost=cost,
    )


def is_good(record: Record, bounds: Mapping[str, float]) -> bool:
    """Whether a complete answer holds every bound, in ms. An answer of one token has no time per output token to break."""
    measured = {"ttft": record.ttft, "tpot": record.tpot, "e2el": record.e2el}
    return all((value := measured[name]) is None or value * 1000 <= bound for name, bound in bounds.items())
