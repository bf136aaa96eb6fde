"""The gateway process: discovery, the picker behind ext_proc, Envoy's control plane and HTTP on one event loop."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import grpc
import msgspec
from aiohttp import web
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from prometheus_client import CollectorRegistry

from penstock.api.fleet import Fleet
from penstock.gateway._pb.envoy.service.discovery.v3.ads_pb2_grpc import add_AggregatedDiscoveryServiceServicer_to_server
from penstock.gateway._pb.envoy.service.ext_proc.v3.external_processor_pb2_grpc import add_ExternalProcessorServicer_to_server
from penstock.gateway.discovery.source import Discovery
from penstock.gateway.extproc.body import MAX_BODY_BYTES
from penstock.gateway.extproc.decisions import DecisionLog
from penstock.gateway.extproc.director import PickDirector
from penstock.gateway.extproc.health import Health
from penstock.gateway.extproc.holding import HoldingArea
from penstock.gateway.extproc.service import ExtProcService
from penstock.gateway.http.metrics import PickerMetrics, StateCollector
from penstock.gateway.http.server import GatewayHttp
from penstock.gateway.load.follower import FleetFollower
from penstock.gateway.load.poller import LoadPoller
from penstock.gateway.load.prompts import PromptLibrary
from penstock.gateway.picker.state import FleetState
from penstock.gateway.xds.listener import ListenerSettings
from penstock.gateway.xds.server import AdsServicer

log = logging.getLogger(__name__)

DRAIN_S = 20.0
"""How long requests that wait for their response headers may keep a stopping gateway; those that stream need it no more."""
APPLY_LIMIT_S = 2.0
EXPIRY_TICK_S = 10.0
MAX_MESSAGE_BYTES = MAX_BODY_BYTES + 64 * 1024
"""A buffered body is one message."""
MAX_STREAMS = 100_000
"""Held requests are open streams: gRPC's own default must not bound them."""


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """What the flags of `penstock gateway` say."""

    name: str
    host: str
    grpc_port: int
    http_port: int
    listener: ListenerSettings


class Gateway:
    """All parts of one gateway process. Ports of 0 are chosen by the system: see `grpc_port`, `http_port` once it runs."""

    def __init__(self, settings: GatewaySettings, discovery: Discovery) -> None:
        self._settings = settings
        self._discovery = discovery
        registry = CollectorRegistry()
        state = FleetState()
        decisions = DecisionLog()
        self._follower = FleetFollower(state)
        self._poller = LoadPoller(state)
        self._prompts = PromptLibrary(state)
        self._holding = HoldingArea(self._follower)
        self._extproc = ExtProcService(PickDirector(state, self._prompts, self._holding, decisions, PickerMetrics(registry)))
        self._ads = AdsServicer(settings.listener, registry)
        self._health = Health()
        self._http = GatewayHttp(settings.name, self._follower, decisions, registry)
        registry.register(StateCollector(self._follower))
        self.grpc_port = settings.grpc_port
        self.http_port = settings.http_port

    async def run(self, stop: asyncio.Event, started: asyncio.Event | None = None) -> None:
        """Serves until `stop` is set, then drains. An end of discovery or of a background task is an error that ends this."""
        async with contextlib.AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            stack.push_async_callback(self._follower.close)
            stack.callback(self._prompts.close)
            await stack.enter_async_context(self._serve_http())
            await stack.enter_async_context(self._serve_grpc())
            log.info("gateway %s: gRPC on port %d, HTTP on port %d", self._settings.name, self.grpc_port, self.http_port)
            if started is not None:
                started.set()
            await self._work(stop, session)
            await self._drain()

    async def _work(self, stop: asyncio.Event, session: aiohttp.ClientSession) -> None:
        """Runs the background tasks until `stop`; the first that fails ends this with its error."""
        jobs = (self._follow(), self._poller.run(session), self._prompts.run(session), self._expire(), stop.wait())
        tasks = [asyncio.ensure_future(job) for job in jobs]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self) -> None:
        known: frozenset[tuple[str, str]] = frozenset()
        async for fleet in self._discovery.watch():
            self._ads.update(fleet)
            # What has gone counts at once; what is new may be picked only when every Envoy knows it as a destination.
            self._follower.update(_without_new(fleet, known))
            if not await self._ads.applied(APPLY_LIMIT_S):
                log.warning("an Envoy has not confirmed the fleet within %.0f s", APPLY_LIMIT_S)
            self._follower.update(fleet)
            known = frozenset((replica.pool, replica.endpoint) for replica in fleet.replicas)
            await self._health.ready(True)
        raise RuntimeError("discovery has ended by itself")

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_TICK_S)
            self._follower.state.bookings.expire(time.monotonic())

    async def _drain(self) -> None:
        """Refuses what is held and waits for requests that have no response headers yet."""
        log.info("stopping: %d requests in progress", self._extproc.open)
        self._http.stopping = True
        await self._health.ready(False)
        self._holding.close()
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._extproc.idle.wait()
        except TimeoutError:
            log.warning("%d requests had no response headers after %.0f s", self._extproc.open, DRAIN_S)

    @contextlib.asynccontextmanager
    async def _serve_grpc(self) -> AsyncIterator[None]:
        options = [
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),
            # Envoy pings all the time; by default gRPC takes the third ping of an idle peer for abuse and cuts the connection.
            ("grpc.http2.max_ping_strikes", 0),
        ]
        server = grpc.aio.server(options=options)
        add_ExternalProcessorServicer_to_server(self._extproc, server)
        add_AggregatedDiscoveryServiceServicer_to_server(self._ads, server)
        add_HealthServicer_to_server(self._health.servicer, server)
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        self.grpc_port = server.add_insecure_port(f"{host}:{self._settings.grpc_port}")
        await self._health.start()
        await server.start()
        try:
            yield
        finally:
            await server.stop(grace=0.5)

    @contextlib.asynccontextmanager
    async def _serve_http(self) -> AsyncIterator[None]:
        runner = web.AppRunner(self._http.application(), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._settings.host, self._settings.http_port)
            await site.start()
            self.http_port = runner.addresses[0][1]
            yield
        finally:
            await runner.cleanup()


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
    await Gateway(settings, discovery).run(stop)
