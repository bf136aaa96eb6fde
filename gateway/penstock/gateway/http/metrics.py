"""The picker's metrics: its counters, and gauges read from its state at each scrape."""

import time
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.api import metrics
from penstock.gateway.load.follower import FleetFollower
from penstock.gateway.models.outcomes import BATCH, Answer, Outcomes
from penstock.gateway.picker.bookings import State
from penstock.gateway.picker.compiled import name_of
from penstock.gateway.residency.index import Knowledge
from penstock.gateway.residency.truth import BUCKETS, TTFT_BUCKETS, Truth

RESPONSE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PICK_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1)


class _Times:
    """A histogram of seconds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """By bucket; the last has no upper bound."""
        self.sum = 0.0

    def observe(self, times: Iterable[float]) -> None:
        for seconds in times:
            self.counts[bisect_left(self.bounds, seconds)] += 1
            self.sum += seconds

    def add_to(self, family: HistogramMetricFamily, *labels: str) -> None:
        family.add_metric(labels, _counts(self.bounds, self.counts), self.sum)


class PickerMetrics(Collector):
    """Kept as it happens and counted many at once: each counter of the library takes a lock of its own for each request."""

    def __init__(self, registry: CollectorRegistry, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        outcomes.listeners.append(self._count_answers)
        self.answered = outcomes.answered
        """One request for a model; see there."""
        self.refusals = Counter(
            metrics.PICK_REFUSALS, "Requests that the picker refused, by reason", ["reason"], registry=registry
        )
        self._picked: list[tuple[str, str, float]] = []
        """What `picked` was told and is not counted yet."""
        self._picks: Counts[tuple[str, str]] = Counts()
        """By pool and policy."""
        self._pick_seconds = _Times(PICK_BUCKETS)
        self._requests: Counts[tuple[str, str]] = Counts()
        """By model and status code."""
        self._response_seconds: dict[str, _Times] = {}
        """By model."""
        registry.register(self)

    def picked(self, pool: str, policy: str, seconds: float) -> None:
        """One request sent to a replica of `pool`, and how long the pick took."""
        self._picked.append((pool, policy, seconds))
        if len(self._picked) >= BATCH:
            self._count_picks()

    def _count_picks(self) -> None:
        picked, self._picked = self._picked, []
        self._picks.update([(pool, policy) for pool, policy, _ in picked])
        self._pick_seconds.observe([seconds for _, _, seconds in picked])

    def _count_answers(self, answers: Sequence[Answer]) -> None:
        self._requests.update([(model, code) for model, code, _, _ in answers])
        for model, _, seconds, _ in answers:
            if seconds is not None:
                times = self._response_seconds.get(model)
                if times is None:
                    times = self._response_seconds[model] = _Times(RESPONSE_BUCKETS)
                times.observe((seconds,))

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families of one scrape."""
        self._count_picks()
        self._outcomes.settle()
        picks = CounterMetricFamily(metrics.PICKS, "Requests sent to a replica", labels=["pool", "policy"])
        for labels, count in self._picks.items():
            picks.add_metric(labels, count)
        yield picks
        pick_seconds = HistogramMetricFamily(metrics.PICK_SECONDS, "Seconds that a pick took, without tokenisation")
        self._pick_seconds.add_to(pick_seconds)
        yield pick_seconds
        requests = CounterMetricFamily(
            metrics.MODEL_REQUESTS, "Requests by serving model and status code", labels=["model", "code"]
        )
        for labels, count in self._requests.items():
            requests.add_metric(labels, count)
        yield requests
        response_seconds = HistogramMetricFamily(
            metrics.RESPONSE_SECONDS,
            "Seconds from the complete request to the headers of a successful response: to the first token, if it is streamed",
            labels=["model"],
        )
        for model, times in self._response_seconds.items():
            times.add_to(response_seconds, model)
        yield response_seconds


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
