"""Metrics of waiting requests and of tenants' requests in flight, read from flow control at each scrape."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.api import metrics
from penstock.gateway.flow.control import FlowControl
from penstock.gateway.flow.ticket import model_of
from penstock.gateway.tenants.registry import Registry

WAIT_BUCKETS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class FlowMetrics:
    """Counted as it happens; nothing is for requests that go on at once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.waits = Histogram(
            metrics.FLOW_WAIT,
            "Seconds that requests waited at the gateway, by outcome",
            ["model", "outcome"],
            buckets=WAIT_BUCKETS,
            registry=registry,
        )


class FlowCollector(Collector):
    """Read at scrape time."""

    def __init__(self, control: FlowControl, tenants: Registry | None) -> None:
        self._control = control
        self._tenants = tenants

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families of one scrape."""
        queued = GaugeMetricFamily(metrics.FLOW_QUEUED, "Requests queued at the gateway", labels=["model", "priority"])
        waiting = Counter[tuple[str, int]]()
        for name, queue in self._control.queues.items():
            for priority, band in queue.bands.items():
                waiting[model_of(name), priority] += sum(len(tickets) for tickets in band.tenants().values())
        for (model, priority), count in waiting.items():
            queued.add_metric([model, str(priority)], count)
        yield queued
        yield GaugeMetricFamily(metrics.FLOW_QUEUED_BYTES, "Bytes of queued requests", value=self._control.bytes)
        if self._tenants is not None:
            running = GaugeMetricFamily(metrics.TENANT_RUNNING, "Queued and running requests by tenant", labels=["tenant"])
            for name, account in self._tenants.accounts():
                running.add_metric([name], account.running)
            yield running
