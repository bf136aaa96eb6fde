"""The picker's metrics: its counters, and gauges read from its state at each scrape."""

import functools
import time
from collections import Counter as Counts
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.api import metrics
from penstock.gateway.load.follower import FleetFollower
from penstock.gateway.models.outcomes import Outcomes
from penstock.gateway.picker.bookings import State
from penstock.gateway.picker.compiled import name_of
from penstock.gateway.residency.index import Knowledge
from penstock.gateway.residency.truth import BUCKETS, TTFT_BUCKETS, Truth

RESPONSE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PICK_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1)


class PickerMetrics:
    """Counted as it happens."""

    def __init__(self, registry: CollectorRegistry, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self.picks = Counter(metrics.PICKS, "Requests sent to a replica", ["pool", "policy"], registry=registry)
        self.refusals = Counter(
            metrics.PICK_REFUSALS, "Requests that the picker refused, by reason", ["reason"], registry=registry
        )
        self.pick_seconds = Histogram(
            metrics.PICK_SECONDS, "Seconds that a pick took, without tokenisation", buckets=PICK_BUCKETS, registry=registry
        )
        self.model_requests = Counter(
            metrics.MODEL_REQUESTS, "Requests by serving model and status code", ["model", "code"], registry=registry
        )
        self.response_seconds = Histogram(
            metrics.RESPONSE_SECONDS,
            "Seconds from the complete request to the headers of a successful response: to the first token, if it is streamed",
            ["model"],
            buckets=RESPONSE_BUCKETS,
            registry=registry,
        )

        # To find a metric by its labels costs the library more than to count.
        self._picks = functools.cache(self.picks.labels)
        self._requests = functools.cache(self.model_requests.labels)
        self._seconds = functools.cache(self.response_seconds.labels)

    def picked(self, pool: str, policy: str, seconds: float) -> None:
        """One request sent to a replica of `pool`, and how long the pick took."""
        self._picks(pool, policy).inc()
        self.pick_seconds.observe(seconds)

    def answered(self, model: str, code: str, seconds: float | None = None, *, streamed: bool = False) -> None:
        """One request for a model: the status it got, or why it got none; how long a good one took to begin, and whether that is
        the time to its first token."""
        self._outcomes.answered(model, code, seconds if streamed else None)
        self._requests(model, code).inc()
        if seconds is not None:
            self._seconds(model).observe(seconds)


class StateCollector(Collector):
    """Read at scrape time, so that nothing is counted twice."""

    def __init__(self, follower: FleetFollower) -> None:
        self._follower = follower

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families of one scrape."""
        state, now = self._follower.state, time.monotonic()
        released = CounterMetricFamily(metrics.BOOKINGS_RELEASED, "Ended bookings by cause", labels=["by"])
        for cause, count in state.bookings.released.items():
            released.add_metric([cause], count)
        yield released
        bookings = GaugeMetricFamily(metrics.BOOKINGS_OPEN, "Open bookings", labels=["state"])
        for booking_state in (State.PENDING, State.UNREPORTED, State.RUNNING):
            bookings.add_metric([booking_state.value], state.bookings.total(booking_state))
        yield bookings
        yield CounterMetricFamily(metrics.EVENT_GAPS, "Gaps found in event streams", value=self._follower.gaps)
        yield from self._residency()
        yield self._info()
        age = GaugeMetricFamily(metrics.REPORT_AGE, "Age of the latest load report in seconds", labels=["replica"])
        for key, replica in state.directory.replicas.items():
            if (heard := state.reports.get(key)) is not None:
                age.add_metric([replica.title], now - heard.at)
        yield age
        corrections = GaugeMetricFamily(
            metrics.TTFT_CORRECTION, "Correction factor on the estimated time to the first token of a replica", labels=["replica"]
        )
        for key, replica in state.directory.replicas.items():
            corrections.add_metric([replica.title], state.correction(key))
        yield corrections
        held = GaugeMetricFamily(metrics.REQUESTS_HELD, "Requests held for lack of a ready replica or of room", labels=["model"])
        for model, count in state.held.items():
            held.add_metric([model], count)
        yield held

    def _info(self) -> Metric:
        info = GaugeMetricFamily(metrics.GATEWAY_INFO, "What runs, and what makes its picks", labels=["version", "picks"])
        info.add_metric([version("penstock"), name_of(self._follower.state.compiled)], 1)
        return info

    def _residency(self) -> Iterator[Metric]:
        state, index = self._follower.state, self._follower.state.residency
        yield GaugeMetricFamily(
            metrics.RESIDENT_BLOCKS, "Cached blocks that the picker knows, over all replicas", value=index.entries
        )
        yield CounterMetricFamily(
            metrics.RESIDENT_BLOCKS_DROPPED, "Cached blocks that the picker forgot to limit its memory", value=index.dropped
        )
        known = Counts(index.knowledge(key) for key in state.directory.replicas)
        replicas = GaugeMetricFamily(
            metrics.RESIDENCY_REPLICAS, "Replicas by how well the picker knows their cache", labels=["knowledge"]
        )
        for knowledge in Knowledge:
            replicas.add_metric([knowledge.value], known[knowledge])
        yield replicas
        yield from _predictions(state.beliefs.truth)


def _predictions(truth: Truth) -> Iterator[Metric]:
    """What was believed of caches against what engines found."""
    tokens = CounterMetricFamily(
        metrics.CACHED_TOKENS, "Cached prompt tokens: predicted by the picker, and found by the engine", labels=["model", "view"]
    )
    miscounts = CounterMetricFamily(
        metrics.PROMPTS_MISCOUNTED, "Prompts whose token count differs from the engine's", labels=["model"]
    )
    errors = HistogramMetricFamily(
        metrics.CACHED_TOKENS_ERROR, "Error of the predicted cached tokens as a share of the prompt", labels=["model"]
    )
    ratios = HistogramMetricFamily(metrics.TTFT_RATIO, "Time to the first token as a multiple of the estimate", labels=["model"])
    for model, tally in truth.models.items():
        tokens.add_metric([model, "predicted"], tally.predicted)
        tokens.add_metric([model, "found"], tally.found)
        miscounts.add_metric([model], tally.miscounted)
        errors.add_metric([model], _counts(BUCKETS, tally.buckets), tally.error_sum)
        ratios.add_metric([model], _counts(TTFT_BUCKETS, tally.ttft_buckets), tally.ttft_sum)
    yield tokens
    yield miscounts
    yield errors
    yield ratios


def _counts(bounds: Sequence[float], buckets: Sequence[int]) -> list[tuple[str, float]]:
    """Return the cumulative counts of a Prometheus histogram. The last of `buckets` has no upper bound."""
    counts = zip((*map(str, bounds), "+Inf"), accumulate(buckets), strict=True)
    return [(bound, float(count)) for bound, count in counts]
