"""The local system: engine replicas as processes, a gateway, Envoy and the autoscaler, from the same desired state as on
Kubernetes."""

import asyncio
import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic

import httpx
import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.api import labels
from penstock.api.fleet import Fleet, Model, PoolsView, Replica, ranks_of
from penstock.operator.autoscale.coldstart import Starting
from penstock.operator.autoscale.limits import Settings
from penstock.operator.autoscale.loop import Autoscaler, ModelScale, PoolScale, Record
from penstock.operator.canary.judges import Judges
from penstock.operator.local import network
from penstock.operator.local.deployment import LocalDeployment
from penstock.operator.local.models import LocalModel
from penstock.operator.local.pod import Phase, Pod
from penstock.operator.local.process import Service
from penstock.operator.local.told import ToldModel, ToldPool
from penstock.operator.observed import ScalingStatus
from penstock.operator.replicas import Replicas
from penstock.operator.scaling import reported
from penstock.operator.status import pool_scaling
from penstock.operator.telemetry import ScalingMetrics, add_replicas, leader_gauge, replicas_family, serve_metrics

logger = logging.getLogger(__name__)

STEP_S = 0.2
GATEWAY_GRACE_S = 5.0
START_TIMEOUT_S = 60.0
ENVOY_METRICS = 9902
"""Port of Envoy's `/metrics`, as on a cluster."""


class LocalError(RuntimeError):
    """The local system cannot start or go on; the message says why and what to do."""


@dataclass(frozen=True)
class Endpoints:
    """Addresses of the parts of the local system."""

    url: str
    """What clients use: Envoy's listener."""
    gateway: str
    """The gateway's HTTP port: `/pools`, `/debug/decisions`, `/metrics`."""
    own: str
    """URL of this process, with `/metrics` and `/models`."""


class LocalRuntime:
    """Runs models on this machine.

    Args:
        models: What to run, with the objects that `desired` makes of them.
        folder: For logs, sockets and the fleet file.
        port: Envoy's listener on 127.0.0.1.
        settings: Of the autoscaling policy.
    """

    def __init__(self, models: Sequence[LocalModel], folder: Path, port: int, settings: Settings | None = None) -> None:
        self.models = models
        self.folder = folder
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.reports: dict[str, ScalingStatus] = {}
        """What the autoscaler last decided, by pool ID."""
        self._starts_told: set[str] = set()
        """UIDs of the pods whose start the autoscaler knows."""
        addresses = network.addresses()
        self._own_address = next(addresses)
        self.deployments = {
            pool_id: LocalDeployment(manifest, addresses, self.logs)
            for model in models
            for pool_id, manifest in model.deployments.items()
        }
        self.endpoints = Endpoints(
            f"http://127.0.0.1:{port}", f"http://{self._own_address}:9090", f"http://{self._own_address}:9091"
        )
        self._port = port
        self._settings = settings or Settings()
        self._fleet = Fleet()
        self._judges = Judges(lambda _: None)  # `_step` looks by itself
        self.services: dict[str, Service] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.registry = CollectorRegistry()
        self.registry.register(_PoolCollector(self.deployments))
        self._scaling = ScalingMetrics(self.registry)
        leader_gauge(self.registry).set(1)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Starts everything, keeps it in its desired state inside the block, and leaves no process behind.

        Raises:
            LocalError: the port is taken, or gateway or Envoy do not start.
            NetworkError: this machine does not let us listen.
        """
        if not network.port_is_free("127.0.0.1", self._port):
            raise LocalError(f"port {self._port} of 127.0.0.1 is in use; choose another with --port")
        server = await serve_metrics(
            self._own_address, 9091, partial(generate_latest, self.registry), [web.get("/models", self.tell)]
        )
        replicas = Replicas()
        try:
            self._step()
            self._tasks.append(asyncio.create_task(self._keep(), name="local runtime"))
            await self._start_services()
            autoscaler = Autoscaler(self._gateways, replicas, self, self._settings, told=self._judges.told)
            self._tasks.append(asyncio.create_task(autoscaler.run(), name="autoscaler"))
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._close()
            await replicas.close()
            await server.cleanup()

    async def wait_ready(self) -> None:
        """Returns when every replica serves and the gateway has heard from it; raises `LocalError` when a pod cannot start."""
        async with httpx.AsyncClient(timeout=5.0) as client:
            while not (self._pods_ready() and await self._gateway_knows(client)):
                for deployment in self.deployments.values():
                    for pod in deployment.pods:
                        if pod.phase is Phase.CRASHED:
                            raise LocalError(f"{pod.name} cannot start: {pod.message}")
                self._check_start()
                self.check()
                await asyncio.sleep(STEP_S)

    def _pods_ready(self) -> bool:
        return all(deployment.ready >= deployment.replicas for deployment in self.deployments.values())

    async def _gateway_knows(self, client: httpx.AsyncClient) -> bool:
        view = await self.view(client)
        replicas = [replica for pool in (view.pools if view else []) for replica in pool.replicas]
        known = {replica.uid for replica in replicas if replica.ready and replica.report is not None}
        return all(pod.uid in known for deployment in self.deployments.values() for pod in deployment.pods)

    async def view(self, client: httpx.AsyncClient) -> PoolsView | None:
        """What the gateway knows of the replicas; None while it does not answer."""
        try:
            answer = await client.get(f"{self.endpoints.gateway}/pools")
            return msgspec.json.decode(answer.raise_for_status().content, type=PoolsView)
        except (httpx.HTTPError, msgspec.MsgspecError):
            return None

    async def _keep(self) -> None:
        while True:
            self._step()
            await asyncio.sleep(STEP_S)

    def _step(self) -> None:
        for deployment in self.deployments.values():
            deployment.step()
        fleet = self._observe()
        if fleet != self._fleet:
            self._fleet = fleet
            partial = self.folder / "fleet.json.part"
            partial.write_bytes(msgspec.json.encode(fleet))
            partial.rename(self.folder / "fleet.json")

    def _observe(self) -> Fleet:
        models = [self._weighed(local) for local in self.models]
        replicas = [
            replica
            for pool_id, deployment in self.deployments.items()
            for pod in [*deployment.pods, *deployment.leaving]
            for replica in replicas_of(pool_id, pod)
        ]
        adapters = [adapter for local in self.models for adapter in local.adapters]
        return Fleet(
            models=models,
            adapters=adapters,
            pools=[pool for m in self.models for pool in m.pools],
            replicas=replicas,
            scaling={pool_id: f"{report.constraint}: {report.reason}" for pool_id, report in self.reports.items()},
        )

    def _weighed(self, local: LocalModel) -> Model:
        """The model with the weight at which its canary stands."""
        model, standing = local.model, self._judges.follow(local.model.id, local.course, None)
        if model.canary is None or standing is None:
            return model
        return msgspec.structs.replace(model, canary=msgspec.structs.replace(model.canary, weight=standing.weight))

    async def _start_services(self) -> None:
        penstock = [sys.executable, "-m", "penstock.cli"]
        grpc_port = 9002
        gateway = ["gateway", "--discovery", f"file:{self.folder / 'fleet.json'}", "--host", self._own_address, "--name", "local"]
        gateway += ["--grpc-port", str(grpc_port), "--http-port", "9090"]
        gateway += ["--listener-host", "127.0.0.1", "--listener-port", str(self._port)]
        self._start_service("gateway", [*penstock, *gateway])
        envoy = [
            "envoy",
            "--gateway",
            f"{self._own_address}:{grpc_port}",
            "--drain-delay",  # no load balancer has to notice that it goes
            "0",
            "--admin-port",
            str(network.free_port()),
            "--metrics",
            f"{self._own_address}:{ENVOY_METRICS}",
            "--concurrency",
            "1",
        ]
        self._start_service("envoy", [*penstock, *envoy])
        deadline = monotonic() + START_TIMEOUT_S
        async with httpx.AsyncClient(timeout=2.0) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    await client.get(f"{self.endpoints.url}/v1/models")
                    return
                self._check_start()
                if monotonic() > deadline:
                    raise LocalError(f"gateway and Envoy did not answer within {START_TIMEOUT_S:.0f} s; see {self.logs}")
                await asyncio.sleep(STEP_S)

    def _start_service(self, name: str, command: list[str]) -> None:
        self.services[name] = Service(name, command, self.logs / f"{name}.log")
        self.services[name].start()

    def _check_start(self) -> None:
        """Raises `LocalError` when gateway or Envoy could not be started; one that ends later is only started again."""
        for service in self.services.values():
            if service.message:
                raise LocalError(f"{service.name} cannot start: {service.message}")

    def check(self) -> None:
        """Raises what has ended a background task, which should never happen."""
        for task in self._tasks:
            if task.done():
                task.result()

    def hurry(self) -> None:
        """Ends every engine at once, whatever it still runs: for an end that is under way."""
        for deployment in self.deployments.values():
            for pod in [*deployment.pods, *deployment.leaving]:
                pod.kill()

    async def _close(self) -> None:
        """Engines first, so that Envoy carries their last answers out."""
        await asyncio.gather(*(deployment.close() for deployment in self.deployments.values()))
        for name in ("envoy", "gateway"):
            if name in self.services:
                await self.services[name].stop(GATEWAY_GRACE_S)

    async def tell(self, _: web.Request) -> web.Response:
        """Answers `/models`, for `penstock explain --local`."""
        return web.Response(body=msgspec.json.encode([self._told(it) for it in self.models]), content_type="application/json")

    def _told(self, local: LocalModel) -> ToldModel:
        pools = {pool_id.rpartition("/")[2]: self.deployments[pool_id] for pool_id in local.deployments}
        scaling = [
            pool_scaling(name, self.reports[pool_id]) for name in pools if (pool_id := f"{local.model.id}/{name}") in self.reports
        ]
        return ToldModel(
            resource={**local.resource, "status": {"scaling": scaling}},
            pools={
                name: ToldPool(replicas=it.replicas, starting=[(one.age_s, one.troubled) for one in _starting(it)])
                for name, it in pools.items()
            },
        )

    # --- the autoscaler's view of this machine ---

    async def _gateways(self) -> Sequence[str]:
        return [self.endpoints.gateway]

    async def targets(self) -> Sequence[ModelScale]:
        """What there is to scale."""
        return [
            ModelScale(local.model.id, local.limits, {name: self._pool(local, name) for name in local.limits.pools})
            for local in self.models
            if local.limits.pools
        ]

    def _pool(self, local: LocalModel, name: str) -> PoolScale:
        deployment = self.deployments[f"{local.model.id}/{name}"]
        return PoolScale(
            replicas=deployment.replicas,
            starting=_starting(deployment),
            started_s=self._new_starts(deployment.pods),
            endpoints={
                pod.uid: f"http://{pod.address}:{pod.port(labels.HTTP_PORT)}"
                for pod in deployment.pods
                if pod.phase is Phase.READY
            },
            dry_run=name in local.dry_runs,
        )

    def _new_starts(self, pods: Sequence[Pod]) -> tuple[float, ...]:
        """How long the pods took that have become ready for the first time since the last look."""
        new = [pod for pod in pods if pod.started_s is not None and pod.uid not in self._starts_told]
        self._starts_told |= {pod.uid for pod in new}
        return tuple(pod.started_s for pod in new if pod.started_s is not None)

    async def scale(self, pool_id: str, replicas: int, victims: Sequence[str]) -> None:
        """See `Actuator`. Victims are cordoned, given time for the picker to notice, and then let go."""
        deployment = self.deployments[pool_id]
        for pod in deployment.pods:
            pod.cordoned = pod.uid in victims
        if victims:
            self._step()
            await asyncio.sleep(2 * STEP_S)
        deployment.scale(replicas, victims)

    async def spare(self, pool_id: str) -> None:
        """Ends the cordon of replicas that have not gone and need not go any more."""
        self.deployments[pool_id].spare()

    async def record(self, record: Record) -> None:
        """Makes a decision visible: status, metrics, and an Event where something was done."""
        old = self.reports.get(record.pool_id)
        self.reports[record.pool_id] = reported(record, old, () if old is None else old.decisions)
        self._scaling.record(record)


def _starting(deployment: LocalDeployment) -> tuple[Starting, ...]:
    """Return the replicas that are not ready."""
    now = monotonic()
    waited_for = (pod for pod in deployment.pods if pod.phase is not Phase.READY)
    return tuple(Starting(now - pod.created, pod.phase is Phase.CRASHED) for pod in waited_for)


class _PoolCollector(Collector):
    """The Deployments' replicas, read at each scrape."""

    def __init__(self, deployments: Mapping[str, LocalDeployment]) -> None:
        self._deployments = deployments

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families of one scrape."""
        family = replicas_family()
        for pool_id, it in self._deployments.items():
            add_replicas(family, pool_id, {"wanted": it.replicas, "ready": it.ready, "updated": it.ready})
        yield family


def replicas_of(pool_id: str, pod: Pod) -> list[Replica]:
    """The pod as the gateway's discovery sees it: each of its data-parallel ranks."""
    whole = Replica(
        uid=pod.uid,
        name=pod.name,
        pool=pool_id,
        host=pod.address,
        port=pod.port(labels.HTTP_PORT),
        events_port=pod.port(labels.EVENTS_PORT),
        replay_port=pod.port(labels.REPLAY_PORT),
        ready=pod.phase is Phase.READY,
        terminating=pod.phase is Phase.TERMINATING,
        cordoned=pod.cordoned,
    )
    return ranks_of(whole, pod.ports)


def run_folder() -> Path:
    """A fresh folder for one run, under the user's runtime or temporary directory."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(tempfile.mkdtemp(prefix="penstock-", dir=base if base and Path(base).is_dir() else None))
