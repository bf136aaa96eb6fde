"""The operator's process: watches, queue, workers, autoscaler, metrics, and who of several may act."""

import asyncio
import logging
import signal
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

from kubernetes.aio.client import ApiClient
from prometheus_client import Gauge

from penstock.api import labels
from penstock.api.fleet import PoolsView
from penstock.http.replica_tls import ReplicaTls
from penstock.kube.cache import Cache
from penstock.kube.caches import Caches
from penstock.kube.client import connect
from penstock.kube.groups import Groups
from penstock.operator.adapters.sync import KIND as ADAPTERS_KEY
from penstock.operator.api import AUTOSCALERS, CHILDREN, NODES, OPTIONAL, PODS, RESOURCES, WORKLOADS, ServerApi
from penstock.operator.apply import Applier
from penstock.operator.autoscale.limits import Settings as PolicySettings
from penstock.operator.autoscale.loop import Autoscaler
from penstock.operator.canary.judges import Judges
from penstock.operator.cluster import Cluster
from penstock.operator.desired import Rendering
from penstock.operator.handlers import ResourceWatch
from penstock.operator.leader import LeadershipLost, Lease, lead
from penstock.operator.loading import KIND as LOAD_TIMES_KEY
from penstock.operator.nodes import Nodes, trimmed_node
from penstock.operator.objects import as_pods
from penstock.operator.observe import Reports
from penstock.operator.other_scalers import OtherScalers, trimmed_autoscaler
from penstock.operator.pickers.sync import Pickers, watched
from penstock.operator.pods import base_url, is_live
from penstock.operator.queue import KeyedQueue
from penstock.operator.reconciler import Reconciler
from penstock.operator.replicas import Replicas
from penstock.operator.routes import Routes
from penstock.operator.scaling import KubernetesActuator
from penstock.operator.store import Children, Key, Resources, trimmed_child, trimmed_pod, trimmed_workload
from penstock.operator.telemetry import Exposition, ModelSeries, leader_gauge, serve_metrics
from penstock.operator.users import Users
from penstock.tasks import run_until

log = logging.getLogger(__name__)

WORKERS = 4
LOADERS = 16
"""Models whose adapters are loaded at a time. A replica may take 20 s for each adapter, and reconciles must not wait for it."""
GATEWAY_SELECTOR = "app.kubernetes.io/name=penstock-gateway"


@dataclass(frozen=True)
class Options:
    """The command's flags."""

    rendering: Rendering
    namespaces: Sequence[str]
    """Namespaces of the resources. Empty: all."""
    system_namespace: str
    """Namespace of the Lease and the gateways."""
    kubeconfig: str | None
    leader_elect: bool
    resync_s: float
    http_host: str
    http_port: int
    gateway_url: str
    """URL for `status.url`."""
    gateway_http_port: int
    """Port of the gateways' `/pools`."""
    replica_tls: ReplicaTls | None
    """How replicas are asked; None: plain HTTP."""
    budgets: Mapping[str, float]
    """What all models of a namespace may cost together, by namespace."""


async def run(options: Options) -> None:
    """Runs until SIGTERM or SIGINT, whatever the API server does.

    Raises:
        NoApiServer: no way to reach an API server is configured.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    exposition = Exposition()
    leader = leader_gauge(exposition.registry)
    replicas = Replicas(options.replica_tls)  # here: certificates that turn bad while another acts must not end this process
    api = await connect(options.kubeconfig)
    server = await serve_metrics(options.http_host, options.http_port, exposition.render)
    try:
        if options.leader_elect:
            await _lead_again_and_again(api, options, replicas, exposition, leader, stop)
        else:
            await _operate(api, options, replicas, exposition, leader, stop)
    finally:
        await replicas.close()
        await server.cleanup()
        await api.close()


async def _lead_again_and_again(
    api: ApiClient, options: Options, replicas: Replicas, exposition: Exposition, leader: Gauge, stop: asyncio.Event
) -> None:
    """Acts while it holds the Lease. One that has lost it waits for it with the others: were it to end, the kubelet would put off
    its next start longer and longer, past the end of what it suffered from."""
    identity = f"{socket.gethostname()}-{uuid4().hex[:8]}"
    server_api = ServerApi(api)
    # With the installation, which is whose ServiceAccount this is, the Lease goes too.
    lease = Lease(server_api, options.system_namespace, identity, owner=partial(server_api.own_account, options.system_namespace))
    while not stop.is_set():
        try:
            await lead(lease, lambda: _operate(api, options, replicas, exposition, leader, stop), stop)
        except LeadershipLost as error:
            log.error("%s: nothing is done until it is held again", error)


async def _operate(
    api: ApiClient, options: Options, replicas: Replicas, exposition: Exposition, leader: Gauge, stop: asyncio.Event
) -> None:
    """Acts until `stop`. All that is known and measured starts from nothing."""
    own = Exposition()
    exposition.texts.append(own.render)
    leader.set(1)
    try:
        await Operator(api, options, replicas, own).run(stop)
    finally:
        leader.set(0)
        exposition.texts.remove(own.render)


class Operator:
    """The running operator, wired together. It lives while this process holds the lease."""

    def __init__(self, api: ApiClient, options: Options, replicas: Replicas, exposition: Exposition) -> None:
        self._api = api
        self._options = options
        server = ServerApi(api)
        self._groups = Groups(api)
        self._queue: KeyedQueue[Key] = KeyedQueue()
        self._loads: KeyedQueue[Key] = KeyedQueue()
        self._resources = Resources()
        exposition.texts.append(ModelSeries(self._resources).render)
        self._routes = Routes(self._look_at)
        self._judges = Judges(lambda model: self._look_at([Key("InferenceModel", *model.split("/"))]))
        observed = Children(self._queue.add)
        self._users = Users(api, ResourceWatch(self._resources, self._queue.add), options.namespaces)
        self._caches = {kind: self._cache(kind) for kind in (*CHILDREN, "Pod", "FetchPod")}
        for kind, cache in self._caches.items():
            observed.follow(cache, kind)
            cache.on_presence(self._look_at_all)
        others = OtherScalers(self._look_at_namespace)
        self._autoscalers = Caches(api, AUTOSCALERS, options.namespaces, trim=trimmed_autoscaler)
        others.follow(self._autoscalers)
        self._nodes = Cache(api, NODES, trim=trimmed_node)
        nodes = Nodes(lambda name: self._look_at(observed.on_node(name)))
        nodes.follow(self._nodes)
        self._gateways = Cache(api, PODS, namespace=options.system_namespace, label_selector=GATEWAY_SELECTOR)
        self._pickers = Pickers(server, watched(api, options.namespaces, self._groups, self._gateways))
        self._replicas = replicas
        self._actuator = KubernetesActuator(
            api=server,
            resources=self._resources,
            observed=observed,
            scale=Applier(server, observed).scale,
            changed=self._queue.add,
            others=others.of,
            registry=exposition.registry,
            scheme=self._replicas.scheme,
        )
        self._reconciler = Reconciler(
            cluster=Cluster(
                server, self._resources, observed, going=lambda: nodes.going, absent=lambda kind: self._caches[kind].absent
            ),
            rendering=options.rendering,
            reports=Reports(self._actuator.report, self._routes.of, self._judges.follow, others.of, options.gateway_url),
            replicas=self._replicas,
            later=self._later,
            registry=exposition.registry,
        )

    def _cache(self, kind: str) -> Caches:
        return Caches(
            self._api,
            PODS if kind == "FetchPod" else RESOURCES[kind],
            self._options.namespaces,
            label_selector=labels.FETCH_OF if kind == "FetchPod" else labels.MODEL,
            trim=trimmed_workload if kind in WORKLOADS else trimmed_pod if kind == "Pod" else trimmed_child,
            optional=self._groups if kind in OPTIONAL else None,
        )

    def _later(self, key: Key, delay_s: float) -> None:
        (self._loads if key.kind in (ADAPTERS_KEY, LOAD_TIMES_KEY) else self._queue).add_after(key, delay_s)

    def _look_at_all(self) -> None:
        self._look_at(None)

    def _look_at_namespace(self, namespace: str) -> None:
        self._look_at(key for key in self._resources.known() if key.namespace == namespace)

    def _look_at(self, keys: Iterable[Key] | None) -> None:
        known = self._resources.known()
        for key in known if keys is None else set(keys).intersection(known):
            self._queue.add(key)

    async def run(self, stop: asyncio.Event) -> None:
        """Reconciles until `stop`."""
        caches = [cache.run() for cache in (*self._caches.values(), self._autoscalers, self._nodes, self._gateways)]
        await run_until(stop, self._users.run(), *caches, self._work(), self._resync(), self._autoscale(), self._pickers.run())

    def _told(self, views: Sequence[PoolsView], asked: int) -> None:
        self._routes.told(views, asked)
        self._judges.told(views, asked)
        self._pickers.told(views, asked)

    async def _gateway_urls(self) -> Sequence[str]:
        pods = as_pods(self._gateways.objects.values())
        return [url for pod in pods if is_live(pod) and (url := base_url(pod, self._options.gateway_http_port))]

    async def _work(self) -> None:
        # Nothing is judged before the children are known: they would seem to be gone.
        known = (cache.synced() for cache in self._caches.values())
        await asyncio.gather(self._users.known.wait(), *known, self._autoscalers.answered(), self._nodes.answered.wait())
        if self._users.absent:
            log.warning("the API server knows no InferenceModels yet: apply the CRDs (penstock crds)")
        log.info("caches are filled, reconciling")
        workers = (self._queue,) * WORKERS + (self._loads,) * LOADERS
        await asyncio.gather(*(queue.work(self._reconciler.reconcile) for queue in workers))

    async def _autoscale(self) -> None:
        # Nothing is sized before it is known who else sizes it. One who may not know goes on as if there were nobody.
        await self._autoscalers.answered()
        await Autoscaler(
            self._gateway_urls, self._replicas, self._actuator, PolicySettings(), told=self._told, budgets=self._options.budgets
        ).run()

    async def _resync(self) -> None:
        while True:
            await asyncio.sleep(self._options.resync_s)
            self._look_at_all()
