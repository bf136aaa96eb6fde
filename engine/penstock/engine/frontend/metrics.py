"""The engine's Prometheus metrics, kept as plain numbers and arrays: a token costs no call into the client library."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from penstock.api import metrics as names
from penstock.api.load_report import WAITING_REASONS
from penstock.engine.messages import CoreStats

# Seconds. Coarse enough for a large model on a busy device, fine enough for a small one on a CPU.
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_E2E = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Histogram:
    """Counts by bucket; many values are observed in one call."""

    def __init__(self, name: str, help_text: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._help = help_text
        self._bounds = np.asarray(buckets, dtype=np.float64)
        self._counts = np.zeros(len(buckets) + 1, dtype=np.int64)
        self._sum = 0.0

    def observe(self, seconds: Sequence[float]) -> None:
        """Counts each value in the first bucket whose bound is not below it."""
        if seconds:
            values = np.asarray(seconds, dtype=np.float64)
            at = np.searchsorted(self._bounds, values, side="left")
            self._counts += np.bincount(at, minlength=len(self._counts))
            self._sum += float(values.sum())

    def family(self) -> HistogramMetricFamily:
        """The present state."""
        bounds = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        buckets = list(zip(bounds, np.cumsum(self._counts).tolist(), strict=True))
        return HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=self._sum)


class EngineMetrics(Collector):
    """What the frontend counts itself, and what the core's newest report says."""

    def __init__(self) -> None:
        self.stats: CoreStats | None = None
        self.prompt_tokens: Counter[str] = Counter(computed=0, local_cache=0)
        """By source; the two add up to all prompt tokens of scheduled requests."""
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter(stop=0, length=0, abort=0, error=0)
        """Sequences by reason."""
        self.ttft = Histogram(names.TIME_TO_FIRST_TOKEN, "Arrival to first token.", _TTFT)
        self.itl = Histogram(names.INTER_TOKEN_LATENCY, "Between successive tokens of a sequence.", _TOKEN)
        self.tpot = Histogram(names.TIME_PER_OUTPUT_TOKEN, "A sequence's mean time a token after the first.", _TOKEN)
        self.e2e = Histogram(names.E2E_LATENCY, "Arrival to the last token.", _E2E)

    def registry(self) -> CollectorRegistry:
        """A registry with these metrics alone."""
        registry = CollectorRegistry()
        registry.register(self)
        return registry

    def collect(self) -> Iterable[Family]:
        """Every family, for one scrape."""
        yield _labelled(names.PROMPT_TOKENS, "Prompt tokens by where their KV came from.", "source", self.prompt_tokens)
        yield CounterMetricFamily(names.GENERATION_TOKENS, "Tokens generated.", value=self.generation_tokens)
        yield _labelled(names.REQUEST_SUCCESS, "Sequences that ended, by reason.", "finished_reason", self.finished)
        yield from (histogram.family() for histogram in (self.ttft, self.itl, self.tpot, self.e2e))
        if self.stats is not None:
            yield from _core(self.stats)


def _core(stats: CoreStats) -> Iterator[Family]:
    report = stats.report
    yield GaugeMetricFamily(names.NUM_REQUESTS_RUNNING, "Sequences in the batch.", value=report.num_requests_running)
    waiting = GaugeMetricFamily(names.NUM_REQUESTS_WAITING, "Sequences that wait, by what they wait for.", labels=["reason"])
    for reason in WAITING_REASONS:
        waiting.add_metric([reason], report.num_requests_waiting.get(reason, 0))
    yield waiting
    yield GaugeMetricFamily(names.KV_CACHE_USAGE, "Share of KV blocks in use, 0 to 1.", value=report.kv_cache_usage_perc)
    yield CounterMetricFamily(names.PREEMPTIONS, "Sequences that gave up their blocks.", value=stats.preemptions)
    yield CounterMetricFamily(names.PREFIX_CACHE_QUERIES, "Prompt tokens looked up.", value=stats.prefix_queries)
    yield CounterMetricFamily(names.PREFIX_CACHE_HITS, "Prompt tokens found.", value=stats.prefix_hits)


def _labelled(name: str, help_text: str, label: str, counts: Counter[str]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, help_text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
