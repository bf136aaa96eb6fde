"""The operator's process: watches, queue, workers, autoscaler, metrics, and who of several may act."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from aiohttp import web
from kubernetes.aio.client import ApiClient
from prometheus_client import CollectorRegistry, generate_latest

from penstock.api import labels
from penstock.kube.backoff import Backoff
from penstock.kube.cache import Cache
from penstock.kube.client import connect
from penstock.operator.api import BUDGETS, DEPLOYMENTS, PODS, SERVICES, ServerApi
from penstock.operator.apply import Applier
from penstock.operator.autoscale.loop import Autoscaler
from penstock.operator.autoscale.policy import Settings as PolicySettings
from penstock.operator.desired import Rendering
from penstock.operator.handlers import ResourceWatch
from penstock.operator.leader import Lease, lead
from penstock.operator.pods import is_live
from penstock.operator.queue import KeyedQueue
from penstock.operator.reconciler import Reconciler
from penstock.operator.scaling import KubernetesActuator
from penstock.operator.store import Children, Key, Resources, trimmed_workload

log = logging.getLogger(__name__)

WORKERS = 4
GATEWAY_SELECTOR = "app.kubernetes.io/name=penstock-gateway"


@dataclass(frozen=True)
class Options:
    """The command's flags."""

    rendering: Rendering
    namespace: str | None
    """None: all."""
    system_namespace: str
    """Where the Lease and the gateways are."""
    kubeconfig: str | None
    leader_elect: bool
    resync_s: float
    http_host: str
    http_port: int
    gateway_url: str
    """For `status.url`."""
    gateway_http_port: int
    """Where gateways answer `/pools`."""


async def run(options: Options) -> None:
    """Runs until SIGTERM or SIGINT.

    Raises:
        LeadershipLost: another operator may act now.
        NoApiServer: no way to reach an API server is configured.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    registry = CollectorRegistry()
    api = await connect(options.kubeconfig)
    server = await _serve_http(options, registry)
    try:
        if options.leader_elect:
            identity = f"{socket.gethostname()}-{uuid4().hex[:8]}"
            lease = Lease(ServerApi(api), options.system_namespace, identity)
            await lead(lease, lambda: Operator(api, options, registry).run(stop), stop)
        else:
            await Operator(api, options, registry).run(stop)
    finally:
        await server.cleanup()
        await api.close()


class Operator:
    """Everything that acts, wired together; lives while this process may act."""

    def __init__(self, api: ApiClient, options: Options, registry: CollectorRegistry) -> None:
        self._api = api
        self._options = options
        self._server = ServerApi(api)
        self._queue: KeyedQueue[Key] = KeyedQueue()
        self._resources = Resources()
        observed = Children(self._queue.add)
        self._caches = {
            "Deployment": Cache(
                api, DEPLOYMENTS, namespace=options.namespace, label_selector=labels.MODEL, trim=trimmed_workload
            ),
            "Service": Cache(api, SERVICES, namespace=options.namespace, label_selector=labels.MODEL),
            "PodDisruptionBudget": Cache(api, BUDGETS, namespace=options.namespace, label_selector=labels.MODEL),
            "Pod": Cache(api, PODS, namespace=options.namespace, label_selector=labels.MODEL),
        }
        for kind, cache in self._caches.items():
            observed.follow(cache, kind)
        self._gateways = Cache(api, PODS, namespace=options.system_namespace, label_selector=GATEWAY_SELECTOR)
        self._actuator = KubernetesActuator(
            api=self._server,
            resources=self._resources,
            observed=observed,
            scale=Applier(self._server, observed).scale,
            changed=self._queue.add,
            registry=registry,
        )
        self._reconciler = Reconciler(
            api=self._server,
            resources=self._resources,
            observed=observed,
            rendering=options.rendering,
            scaling=self._actuator.report,
            url=options.gateway_url,
            registry=registry,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Reconciles until `stop`."""
        await _wait_for_crds(self._server, stop)
        watch = ResourceWatch(self._api, self._resources, self._queue.add).run(self._options.namespace)
        caches = [cache.run() for cache in (*self._caches.values(), self._gateways)]
        autoscaler = Autoscaler(self._gateway_urls, self._actuator, PolicySettings())
        await _until(stop, watch, *caches, self._work(), self._resync(), autoscaler.run())

    async def _gateway_urls(self) -> Sequence[str]:
        pods = self._gateways.objects.values()
        addresses = [pod.get("status", {}).get("podIP") for pod in pods if is_live(pod)]
        return [f"http://{address}:{self._options.gateway_http_port}" for address in addresses if address]

    async def _work(self) -> None:
        # Nothing is judged before the children are known: they would seem to be gone.
        await asyncio.gather(*(cache.synced.wait() for cache in self._caches.values()))
        log.info("caches are filled, reconciling")
        await asyncio.gather(*(self._queue.work(self._reconciler.reconcile) for _ in range(WORKERS)))

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(self._options.resync_s)
            for key in self._resources.known():
                self._queue.add(key)


async def _until(stop: asyncio.Event, *running: Coroutine[Any, Any, None]) -> None:
    """Runs all until `stop`, or until one of them fails, which is raised."""
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(one) for one in (*running, stop.wait())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_for_crds(server: ServerApi, stop: asyncio.Event) -> None:
    """kopf would watch nothing for ever if the CRDs came after it."""
    backoff = Backoff(first=0.5, longest=10.0)
    while not stop.is_set() and not await server.serves(labels.GROUP, labels.VERSION):
        log.warning("the API server knows no InferenceModels yet: apply the CRDs (penstock crds)")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), backoff.next())


async def _serve_http(options: Options, registry: CollectorRegistry) -> web.AppRunner:
    """`/metrics` and `/healthz`; a standby answers too."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), content_type="text/plain", charset="utf-8")

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/healthz", healthy)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, options.http_host, options.http_port).start()
    return runner
