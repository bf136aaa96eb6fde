"""What the picker counts, and what it reads off its state when somebody asks."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.api import metrics
from penstock.gateway.load.follower import FleetFollower
from penstock.gateway.picker.bookings import State

PICK_BUCKETS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1)


class PickerMetrics:
    """Counted as it happens."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.picks = Counter(metrics.PICKS, "Requests sent to a replica", ["pool", "policy"], registry=registry)
        self.refusals = Counter(metrics.PICK_REFUSALS, "Requests answered with an error", ["reason"], registry=registry)
        self.pick_seconds = Histogram(
            metrics.PICK_SECONDS, "Time of a pick, without tokenising", buckets=PICK_BUCKETS, registry=registry
        )


class StateCollector(Collector):
    """Read at scrape time, so that nothing is counted twice."""

    def __init__(self, follower: FleetFollower) -> None:
        self._follower = follower

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        state, now = self._follower.state, time.monotonic()
        released = CounterMetricFamily(metrics.BOOKINGS_RELEASED, "Ends of bookings by cause", labels=["by"])
        for cause, count in state.bookings.released.items():
            released.add_metric([cause], count)
        yield released
        bookings = GaugeMetricFamily(metrics.BOOKINGS_OPEN, "Open bookings", labels=["state"])
        for booking_state in (State.PENDING, State.UNREPORTED, State.RUNNING):
            bookings.add_metric([booking_state.value], state.bookings.total(booking_state))
        yield bookings
        yield CounterMetricFamily(metrics.EVENT_GAPS, "Event streams found to have lost messages", value=self._follower.gaps)
        age = GaugeMetricFamily(metrics.REPORT_AGE, "Age of the newest load report", labels=["replica"])
        for key, replica in state.replicas().items():
            if (heard := state.reports.get(key)) is not None:
                age.add_metric([replica.name], now - heard.at)
        yield age
        held = GaugeMetricFamily(metrics.REQUESTS_HELD, "Requests waiting for a replica", labels=["model"])
        for model, count in state.held.items():
            held.add_metric([model], count)
        yield held
