"""What the operator tells Prometheus of models and of the autoscaler's decisions; `penstock up` tells the same of its own."""

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import GaugeMetricFamily

from penstock.api import metrics
from penstock.operator.autoscale.loop import Record
from penstock.operator.store import Key, Resources

_POOL: Final = ("namespace", "model", "pool")
_REPLICAS_HELP: Final = "Replicas by pool and state"


class ScalingMetrics:
    """The autoscaler's last word on each pool."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._desired = Gauge(metrics.DESIRED_REPLICAS, "Replicas that the autoscaler wants", _POOL, registry=registry)
        self._current = Gauge(metrics.CURRENT_REPLICAS, "Replicas that the pool currently asks for", _POOL, registry=registry)
        demand = "Demand on the pool's role, in replicas of the role's strongest pool"
        self._demand = Gauge(metrics.DEMAND_REPLICAS, demand, _POOL, registry=registry)
        self._cold_start = Gauge(
            metrics.COLD_START, "Observed seconds until a new replica becomes ready", _POOL, registry=registry
        )
        decisions = "Decisions of the autoscaler by the constraint that applied"
        self._decisions = Counter(metrics.SCALING_DECISIONS, decisions, ["constraint"], registry=registry)
        self._told: set[str] = set()

    def record(self, record: Record) -> None:
        """Counts one decision."""
        labels, decision = record.pool_id.split("/"), record.decision
        self._desired.labels(*labels).set(decision.replicas)
        self._current.labels(*labels).set(record.current)
        self._demand.labels(*labels).set(decision.inputs.get("demand", math.nan))
        self._cold_start.labels(*labels).set(record.learned.cold_start_s or math.nan)
        self._decisions.labels(decision.constraint).inc()
        self._told.add(record.pool_id)

    def keep(self, pools: Set[str]) -> None:
        """Remove the series of all other pools: those that are gone or that another autoscaler sizes now."""
        for gone in self._told - pools:
            for gauge in (self._desired, self._current, self._demand, self._cold_start):
                gauge.remove(*gone.split("/"))
        self._told &= pools


class Exposition:
    """What `/metrics` answers: a registry of the client library, then what others keep as text themselves."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.texts: list[Callable[[], bytes]] = []
        """Each gives whole families in Prometheus' text format."""

    def render(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return b"".join([generate_latest(self.registry), *(text() for text in self.texts)])


def leader_gauge(registry: CollectorRegistry) -> Gauge:
    """Whether this operator acts. A standby tells it too: what only a leader tells would be gone with the last leader, and no
    alert fires on what is absent."""
    return Gauge(metrics.OPERATOR_LEADER, "1 while this operator acts, 0 while it waits for the Lease", registry=registry)


class _Family:
    """A family of gauges in Prometheus' text format."""

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self.head = f"# HELP {name} {text}\n# TYPE {name} gauge\n".encode()
        self._name = name
        self._labels = labels

    def line(self, values: Sequence[str], value: int) -> str:
        """One sample."""
        labels = ",".join(f'{label}="{_escaped(it)}"' for label, it in zip(self._labels, values, strict=True))
        return f"{self._name}{{{labels}}} {value}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


_CONDITION: Final = _Family(
    metrics.MODEL_CONDITION,
    "1 for each condition of a model, with its present status and reason",
    ["namespace", "model", "condition", "status", "reason"],
)
_REPLICAS: Final = _Family(metrics.POOL_REPLICAS, _REPLICAS_HELP, [*_POOL, "state"])
_CANARY: Final = _Family(
    metrics.CANARY_WEIGHT,
    "Percent of another model's conversations that a canary gets that is judged, by what was found of it",
    ["namespace", "model", "verdict"],
)


@dataclass(frozen=True)
class _Told:
    """One model's samples."""

    resource: dict[str, Any]
    """The resource. Each version is a new object."""
    lines: tuple[bytes, ...]
    """Metric lines of each family."""


class ModelSeries:
    """Conditions and replicas as the statuses of InferenceModels have them, as text. A model's is made when its resource is
    another, and not at each scrape: a thousand models have twelve thousand samples."""

    _FAMILIES: Final = (_CONDITION, _REPLICAS, _CANARY)

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._told: dict[Key, _Told] = {}

    def render(self) -> bytes:
        """The families in Prometheus' text format."""
        told: dict[Key, _Told] = {}
        for key in self._resources.known():
            resource = self._resources.get(key)
            if key.kind != "InferenceModel" or resource is None:
                continue
            its = self._told.get(key)
            if its is None or its.resource is not resource:
                its = _Told(resource, _lines(key, resource.get("status", {})))
            told[key] = its
        self._told = told
        parts: list[bytes] = []
        for number, family in enumerate(self._FAMILIES):
            parts.append(family.head)
            parts.extend(it.lines[number] for it in told.values())
        return b"".join(parts)


def _lines(key: Key, status: dict[str, Any]) -> tuple[bytes, bytes, bytes]:
    """A model's samples of each family."""
    who = (key.namespace, key.name)
    conditions = [_CONDITION.line((*who, it["type"], it["status"], it["reason"]), 1) for it in status.get("conditions", [])]
    replicas: list[str] = []
    for pool in status.get("pools", []):
        ready, wanted = pool["ready"].split("/")
        told = {"wanted": int(wanted), "ready": int(ready), "updated": pool["updated"]}
        replicas += [_REPLICAS.line((*who, pool["name"], state), count) for state, count in told.items()]
    canary = status.get("canary")
    weight = [] if canary is None else [_CANARY.line((*who, canary["verdict"]), canary["weight"])]
    return "".join(conditions).encode(), "".join(replicas).encode(), "".join(weight).encode()


def replicas_family() -> GaugeMetricFamily:
    """An empty family of pools' replicas."""
    return GaugeMetricFamily(metrics.POOL_REPLICAS, _REPLICAS_HELP, labels=[*_POOL, "state"])


def add_replicas(family: GaugeMetricFamily, pool_id: str, replicas: dict[str, int]) -> None:
    """Adds one pool's numbers by state."""
    for state, count in replicas.items():
        family.add_metric([*pool_id.split("/"), state], count)


async def serve_metrics(host: str, port: int, render: Callable[[], bytes], more: Sequence[web.RouteDef] = ()) -> web.AppRunner:
    """Answers `/metrics` with what `render` gives, `/healthz`, and the routes in `more`, until the result is cleaned up."""

    async def tell(_: web.Request) -> web.Response:
        return web.Response(body=render(), content_type="text/plain", charset="utf-8")

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application()
    app.add_routes([web.get("/metrics", tell), web.get("/healthz", healthy), *more])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
