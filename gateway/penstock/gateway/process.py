"""The gateway process: discovery, the picker behind ext_proc, Envoy's control plane and HTTP on one event loop."""

import asyncio
import contextlib
import gc
import logging
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from prometheus_client import CollectorRegistry

from penstock.api.fleet import Fleet, InferencePool
from penstock.gateway._pb.envoy.data.accesslog.v3.accesslog_pb2 import HTTPAccessLogEntry
from penstock.gateway._pb.envoy.service.accesslog.v3.als_pb2_grpc import add_AccessLogServiceServicer_to_server
from penstock.gateway._pb.envoy.service.discovery.v3.ads_pb2_grpc import add_AggregatedDiscoveryServiceServicer_to_server
from penstock.gateway.audit.director import Audit
from penstock.gateway.audit.writer import AuditWriter
from penstock.gateway.discovery.source import Discovery
from penstock.gateway.extproc.access_log import AccessLogService
from penstock.gateway.extproc.at_once import AtOnce
from penstock.gateway.extproc.call import Routed
from penstock.gateway.extproc.ceiling import Ceiling
from penstock.gateway.extproc.decisions import DecisionLog
from penstock.gateway.extproc.director import PickDirector
from penstock.gateway.extproc.exchange import Director
from penstock.gateway.extproc.failures import Failure, FailureLog
from penstock.gateway.extproc.health import Health
from penstock.gateway.extproc.service import ExtProcService
from penstock.gateway.extproc.stages.admit import Admit
from penstock.gateway.extproc.stages.identify import Identify
from penstock.gateway.extproc.stages.listing import Listing
from penstock.gateway.extproc.stages.meter import Meter, TenantMetrics
from penstock.gateway.extproc.stages.pick import Pick
from penstock.gateway.extproc.stages.resolve import Resolve
from penstock.gateway.extproc.stages.respond import Respond
from penstock.gateway.extproc.stages.tokenise import Tokenise
from penstock.gateway.extproc.underway import Underway
from penstock.gateway.extproc.wire import wire_of
from penstock.gateway.flow.control import DEFAULT_LIMITS, FlowLimits
from penstock.gateway.flow.gate import FlowGate
from penstock.gateway.front_ends import FRONT_ENDS
from penstock.gateway.http.access import DebugToken
from penstock.gateway.http.flow_metrics import FlowCollector, FlowMetrics
from penstock.gateway.http.metrics import PickerMetrics, StateCollector
from penstock.gateway.http.server import GatewayHttp
from penstock.gateway.http.tenants import tenants_view
from penstock.gateway.load.follower import FleetFollower
from penstock.gateway.load.poller import PERIOD_S, LoadPoller
from penstock.gateway.load.prompts import PromptLibrary
from penstock.gateway.load.replica_client import ReplicaClient, ReplicaTlsStates
from penstock.gateway.models.served import ServedNames
from penstock.gateway.picker.choice import MAX_ENDPOINTS
from penstock.gateway.picker.compiled import installed
from penstock.gateway.picker.state import FleetState
from penstock.gateway.pool_ports import Listening, PoolPorts
from penstock.gateway.residency.index import SWEPT_AT_ONCE
from penstock.gateway.residency.limit import blocks_that_fit
from penstock.gateway.tenants.watch import TenantsWatcher
from penstock.gateway.tls import Certificate
from penstock.gateway.tracing import TracedDirector
from penstock.gateway.xds.listener import ListenerSettings
from penstock.gateway.xds.server import AdsServicer
from penstock.http.replica_tls import ReplicaTls
from penstock.http.span_exporter import SpanExporter
from penstock.tasks import run_until

log = logging.getLogger(__name__)

DRAIN_S = 300.0
"""How long requests that wait for their response headers may keep a stopping gateway; those that stream need it no more."""
NOTICE_S = 1.5
"""What Envoy's health checks need to find out that this process is going."""
APPLY_LIMIT_S = 2.0
COLLECT_AFTER = 10_000
"""So many new objects make the collector look for cycles, of which usual requests leave none. Python's own number, 700, is that
of a few requests under way."""
EXPIRY_TICK_S = 10.0
_SERVER_ERROR = 500


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """What the flags of `penstock gateway` say."""

    name: str
    host: str
    grpc_port: int
    http_port: int
    listener: ListenerSettings
    health_port: int | None = None
    destinations: int = MAX_ENDPOINTS
    """The longest list of destinations that the callers read; 1 for those that take one address."""
    certificate: Certificate | None = None
    """TLS on the gRPC port; None for plaintext."""
    ext_proc: str = "lean"
    """A name in `FRONT_ENDS`."""
    pool_ports: Mapping[str, int] = field(default_factory=dict[str, int])
    """Ports of InferencePools by their ids."""
    pool_port_range: range = range(9100, 9200)
    """Ports for the other InferencePools."""
    pool_fallbacks: bool = False
    """Whether foreign gateways take a list of destinations."""
    pool_certificate: Certificate | None = None
    """TLS on the ports of InferencePools; None for plaintext."""
    replica_tls: ReplicaTls | None = None
    """TLS to replicas, Envoy's and our own; None: plain HTTP."""
    tenants: Path | None = None
    """The tenants file. None: the gateway does not tell clients apart."""
    audit_log: Path | None = None
    """File of the audit log; `-`: standard output; None: none."""
    poll_period_s: float = PERIOD_S
    """Seconds between two polls of another project's engine. 0: no polls."""
    tokenizers: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """Folders with the tokenizers of models that engines of others serve, by served name."""
    debug_token: Path | None = None
    """A file with the token for `/debug/*`; None: they answer clients on this machine alone."""
    console: bool = True
    """Whether the console is served."""
    flow: FlowLimits = DEFAULT_LIMITS
    """How much may wait."""


class Gateway:
    """All parts of one gateway process. Ports of 0 are chosen by the system: see `grpc_port` and its like once it runs."""

    def __init__(self, settings: GatewaySettings, discovery: Discovery) -> None:
        self._settings = settings
        self._discovery = discovery
        registry = CollectorRegistry()
        self._compiled = compiled = installed()
        state = FleetState(blocks_that_fit(), compiled=compiled)
        decisions = DecisionLog()
        self._failures = FailureLog()
        self._follower = FleetFollower(state)
        self._poller = LoadPoller(state, self._follower.learned, settings.poll_period_s)
        self._prompts = PromptLibrary(state, settings.tokenizers)
        self._served = ServedNames(state)
        self._gate = FlowGate(self._follower, settings.flow)
        self._underway = Underway(state.bookings, state.reports)
        metrics, resolve = PickerMetrics(registry, state.outcomes), Resolve(state, self._served, self._prompts)
        self._tenants = None if settings.tenants is None else TenantsWatcher(settings.tenants, registry)
        tenants = None if self._tenants is None else self._tenants.registry
        identify = Identify(tenants)
        self._respond = Respond(state, self._gate, metrics)
        pick, at_once = Pick(state, self._underway, decisions, metrics), None
        if compiled is not None and tenants is None:
            at_once = AtOnce(
                compiled, state, resolve=resolve, prompts=self._prompts, gate=self._gate, pick=pick, underway=self._underway
            )
        director = PickDirector(
            identify=identify,
            resolve=resolve,
            listing=Listing(resolve),
            meter=Meter(tenants, self._gate, self._follower, TenantMetrics(registry)),
            admit=Admit(self._gate, resolve, FlowMetrics(registry)),
            tokenise=Tokenise(state, self._prompts),
            pick=pick,
            respond=self._respond,
            underway=self._underway,
            metrics=metrics,
            failures=self._failures,
            at_once=at_once,
        )
        ceiling = Ceiling()
        traces = settings.listener.traces
        self._spans: SpanExporter | None = None
        asked: Director = director
        if traces is not None:
            self._spans = SpanExporter(
                traces.endpoint, {"service.name": "penstock-gateway", "service.instance.id": settings.name}
            )
            asked = TracedDirector(director, decisions, self._spans, traces.percent)
        self._audit = self._audit_log(registry, identify)
        if self._audit is not None:
            asked = self._audit.director(asked)
        wire = wire_of(compiled)
        self._extproc = ExtProcService(asked, settings.destinations, ceiling=ceiling, traced=traces is not None, wire=wire)
        self._pool_ports = PoolPorts(
            asked,
            self._listen,
            fixed=settings.pool_ports,
            ports=settings.pool_port_range,
            fallbacks=settings.pool_fallbacks,
            ceiling=ceiling,
            wire=wire,
        )
        self._access_log = AccessLogService(self._underway, self._over)
        self._ads = AdsServicer(settings.listener, registry, settings.replica_tls)
        self._health = Health()
        self._tls = ReplicaTlsStates(settings.replica_tls)
        self._http = GatewayHttp(
            settings.name,
            self._follower,
            decisions,
            self._ads,
            self._pool_ports,
            registry,
            self._tls,
            failures=self._failures,
            tenants=lambda: tenants_view(tenants, self._gate.control),
            token=None if settings.debug_token is None else DebugToken(settings.debug_token),
            console=settings.console,
        )
        registry.register(StateCollector(self._follower))
        registry.register(FlowCollector(self._gate.control, tenants))
        self.grpc_port = settings.grpc_port
        self.health_port = settings.health_port
        self.http_port = settings.http_port

    async def run(self, stop: asyncio.Event, started: asyncio.Event | None = None) -> None:
        """Serves until `stop` is set, then drains. An end of discovery or of a background task is an error that ends this."""
        async with contextlib.AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            stack.push_async_callback(self._follower.close)
            stack.callback(self._prompts.close)
            if self._audit is not None:
                self._audit.start()
                stack.callback(self._audit.close)
            await stack.enter_async_context(self._serve_http())
            await stack.enter_async_context(self._serve_grpc())
            log.info("gateway %s: gRPC on port %d, HTTP on port %d", self._settings.name, self.grpc_port, self.http_port)
            if started is not None:
                started.set()
            await self._work(stop, ReplicaClient(session, self._tls))
            await self._drain()

    def _audit_log(self, registry: CollectorRegistry, identify: Identify) -> Audit | None:
        path = self._settings.audit_log
        if path is None:
            return None
        writer = AuditWriter(None if str(path) == "-" else path, registry)
        return Audit(writer, self._settings.name, follower=self._follower, identify=identify, underway=self._underway)

    def _over(self, routed: Routed, entry: HTTPAccessLogEntry) -> None:
        """Envoy has done with a request."""
        if self._audit is not None:
            self._audit.over(routed, entry)
        status = entry.response.response_code.value
        if status >= _SERVER_ERROR:
            self._failures.add(self._failed(routed, status, entry))
        self._respond.over(routed, status)

    def _failed(self, routed: Routed, status: int, entry: HTTPAccessLogEntry) -> Failure:
        """A request that a replica did not serve."""
        replica = self._follower.state.directory.replicas.get(routed.booking.key)
        return Failure(
            time=time.time(),
            request_id=routed.booking.request_id,
            model=routed.model,
            tenant=routed.tenant or None,
            status=status,
            reason="replica_error",
            message=entry.response.response_code_details,
            replica=replica.title if replica is not None else routed.booking.key.uid,
        )

    async def _work(self, stop: asyncio.Event, client: ReplicaClient) -> None:
        """Runs the background tasks until `stop`; the first that fails ends this with its error."""
        jobs = (
            self._follow(),
            self._poller.run(client),
            self._prompts.run(client),
            self._served.run(client),
            self._gate.run(),
            self._expire(),
        )
        optional = (each.run() for each in (self._tenants, self._spans, self._audit) if each is not None)
        await run_until(stop, *jobs, *optional)

    async def _follow(self) -> None:
        known: frozenset[tuple[str, str]] = frozenset()
        async for fleet in self._discovery.watch():
            self._ads.update(fleet)
            # What has gone counts at once; what is new may be picked only when every Envoy knows it as a destination.
            self._follower.update(_without_new(fleet, known))
            if not await self._ads.applied(APPLY_LIMIT_S):
                log.warning("an Envoy has not confirmed the fleet within %.0f s", APPLY_LIMIT_S)
            self._follower.update(fleet)
            await self._serve_pools(fleet.inference_pools)
            known = frozenset((replica.pool, replica.endpoint) for replica in fleet.replicas)
            await self._health.ready(True)
        raise RuntimeError("discovery has ended by itself")

    async def _serve_pools(self, pools: Sequence[InferencePool]) -> None:
        if await self._pool_ports.update(pools):
            self._follower.ports_changed()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_TICK_S)
            self._follower.state.bookings.expire(time.monotonic())
            self._underway.sweep(time.monotonic())
            await self._serve_pools(self._follower.state.directory.fleet.inference_pools)
            self._follower.state.residency.sweep(SWEPT_AT_ONCE)
            self._follower.state.tiers.sweep(SWEPT_AT_ONCE)
            self._follower.state.beliefs.history.expire(time.monotonic())

    async def _drain(self) -> None:
        """Lets another gateway take over: hands on what is held, and waits for requests that have no response headers yet."""
        services = [self._extproc, *self._pool_ports.services]
        log.info("stopping: %d requests in progress", sum(service.open for service in services))
        self._http.stopping = True
        await self._health.ready(False)
        self._gate.close()
        self._access_log.leave()
        # Until Envoy has noticed, it asks here; and is answered as before.
        await asyncio.sleep(NOTICE_S)
        try:
            async with asyncio.timeout(DRAIN_S - NOTICE_S):
                for service in services:
                    await service.idle()
        except TimeoutError:
            left = sum(service.open for service in services)
            log.warning("%d requests had no response headers after %.0f s", left, DRAIN_S)

    @contextlib.asynccontextmanager
    async def _serve_grpc(self) -> AsyncIterator[None]:
        settings, front_end = self._settings, FRONT_ENDS[self._settings.ext_proc]
        servers = [server := front_end(self._compiled)]
        self._extproc.add_to(server)
        add_AggregatedDiscoveryServiceServicer_to_server(self._ads, server)
        add_AccessLogServiceServicer_to_server(self._access_log, server)
        add_HealthServicer_to_server(self._health.servicer, server)
        await self._health.start()
        try:
            self.grpc_port = await server.listen(settings.host, settings.grpc_port, settings.certificate)
            if settings.health_port is not None:
                servers.append(health := front_end(self._compiled))
                add_HealthServicer_to_server(self._health.servicer, health)
                self.health_port = await health.listen(settings.host, settings.health_port, None)  # kubelets speak no TLS
            yield
        finally:
            await asyncio.gather(self._pool_ports.close(0.5), *(each.stop(grace=0.5) for each in servers))

    async def _listen(self, service: ExtProcService, port: int) -> Listening:
        """Serves one InferencePool; see `pool_ports.Listen`."""
        server = FRONT_ENDS[self._settings.ext_proc](self._compiled)
        service.add_to(server)
        add_HealthServicer_to_server(self._health.servicer, server)
        await server.listen(self._settings.host, port, self._settings.pool_certificate)
        return server

    @contextlib.asynccontextmanager
    async def _serve_http(self) -> AsyncIterator[None]:
        runner = web.AppRunner(self._http.application(), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._settings.host, self._settings.http_port)
            await site.start()
            self.http_port = runner.addresses[0][1]
            if _needs_loopback(self._settings.host):
                await self._serve_loopback(runner)
            yield
        finally:
            await runner.cleanup()

    async def _serve_loopback(self, runner: web.AppRunner) -> None:
        """The HTTP port on this machine's own address too: `kubectl port-forward` reaches a pod by no other."""
        try:
            await web.TCPSite(runner, "127.0.0.1", self.http_port).start()
        except OSError as error:
            log.warning(
                "port %d of 127.0.0.1 cannot be had: kubectl port-forward will not work: %s", self.http_port, error.strerror
            )


def _needs_loopback(host: str) -> bool:
    """Whether a server on `host` cannot be reached by 127.0.0.1."""
    try:
        address = ip_address(host)
    except ValueError:  # a name
        return False
    return not address.is_loopback and not address.is_unspecified


def _without_new(fleet: Fleet, known: frozenset[tuple[str, str]]) -> Fleet:
    """The fleet with only those replicas ready that are in `known` (pool, endpoint)."""
    replicas = [
        replica if (replica.pool, replica.endpoint) in known else msgspec.structs.replace(replica, ready=False)
        for replica in fleet.replicas
    ]
    return msgspec.structs.replace(fleet, replicas=replicas)


async def serve(settings: GatewaySettings, discovery: Discovery) -> None:
    """Runs a gateway until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    # What is imported stays: no collection, which would hold up every request, need look at it again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)
    await Gateway(settings, discovery).run(stop)
