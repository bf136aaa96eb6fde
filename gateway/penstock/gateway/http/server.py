"""The gateway's own HTTP: what the autoscaler, Prometheus, probes and people ask."""

import asyncio
import math
import time
from collections.abc import Callable
from importlib.metadata import version

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from penstock.gateway.extproc.decisions import KEPT, DecisionLog
from penstock.gateway.extproc.failures import KEPT as FAILURES_KEPT
from penstock.gateway.extproc.failures import FailureLog
from penstock.gateway.http.access import DebugToken, debug_access
from penstock.gateway.http.console import console_routes
from penstock.gateway.http.models import models_view
from penstock.gateway.http.tenants import TenantView
from penstock.gateway.load.follower import FleetFollower
from penstock.gateway.load.replica_client import ReplicaTlsStates
from penstock.gateway.picker.compiled import name_of
from penstock.gateway.picker.pooled import pools_view
from penstock.gateway.pool_ports import PoolPorts
from penstock.gateway.xds.server import AdsServicer

MAX_POLL_S = 60.0


class GatewayHttp:
    """`/pools`, `/debug/*`, `/metrics`, `/version`, `/healthz`, `/readyz` and the console.

    Args:
        token: Guards `/debug/*`; None: they answer clients on this machine alone.
        console: Whether the page is served.
    """

    def __init__(
        self,
        name: str,
        follower: FleetFollower,
        decisions: DecisionLog,
        ads: AdsServicer,
        pool_ports: PoolPorts,
        registry: CollectorRegistry,
        replica_tls: ReplicaTlsStates,
        failures: FailureLog,
        tenants: Callable[[], list[TenantView]],
        token: DebugToken | None = None,
        console: bool = True,
    ) -> None:
        self._name = name
        self._follower = follower
        self._decisions = decisions
        self._ads = ads
        self._pool_ports = pool_ports
        self._registry = registry
        self._replica_tls = replica_tls
        self._failures = failures
        self._tenants = tenants
        self._token = token
        self._console = console
        self.stopping = False

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[debug_access(self._token)])
        app.add_routes(
            [
                web.get("/pools", self._pools),
                web.get("/debug/decisions", self._last_decisions),
                web.get("/debug/failures", self._last_failures),
                web.get("/debug/models", self._models),
                web.get("/debug/tenants", self._tenants_now),
                web.get("/debug/xds", self._xds),
                web.get("/debug/tls", self._tls),
                web.get("/metrics", self._metrics),
                web.get("/version", self._version),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
            ]
        )
        if self._console:
            app.add_routes(console_routes())
        return app

    async def _pools(self, request: web.Request) -> web.Response:
        """The pooled load. `?after=VERSION&timeout=SECONDS`: as soon as the version differs, or after that time."""
        after = _number(request, "after", -1.0)
        deadline = time.monotonic() + min(_number(request, "timeout", 0.0), MAX_POLL_S)
        while after == self._follower.state.version and not self.stopping:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._follower.changed()
            except TimeoutError:
                break
        state, refused = self._follower.state, self._ads.refused_pools()
        return _json(pools_view(state, self._name, time.monotonic(), refused, self._pool_ports.ports))

    async def _last_decisions(self, request: web.Request) -> web.Response:
        """The last decisions, newest first. `?n=COUNT&model=NAME&request=ID`."""
        count = int(min(_number(request, "n", KEPT), KEPT))
        return _json(self._decisions.last(count, request.query.get("model"), request.query.get("request")))

    async def _last_failures(self, request: web.Request) -> web.Response:
        """The last requests that failed, newest first. `?n=COUNT`."""
        return _json(self._failures.last(int(min(_number(request, "n", FAILURES_KEPT), FAILURES_KEPT))))

    async def _tenants_now(self, request: web.Request) -> web.Response:
        """What tenants use, and what they may."""
        return _json(self._tenants())

    async def _xds(self, request: web.Request) -> web.Response:
        """The Envoys that take their configuration from here: what each was sent, has taken and refuses."""
        return _json(self._ads.view())

    async def _tls(self, request: web.Request) -> web.Response:
        """Return the state of TLS with each replica, and the reason where it failed."""
        return _json(self._replica_tls.view(self._follower.state.directory.replicas.values()))

    async def _models(self, request: web.Request) -> web.Response:
        """Return which model is served under which name and port."""
        return _json(models_view(self._follower.state, self._pool_ports.ports))

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _version(self, request: web.Request) -> web.Response:
        """Which version runs, and what makes its picks."""
        return _json({"version": version("penstock"), "picks": name_of(self._follower.state.compiled)})

    async def _healthz(self, request: web.Request) -> web.Response:
        """The event loop turns."""
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        """The fleet is known and the process is not stopping."""
        if self.stopping:
            return web.Response(status=503, text="stopping\n")
        if not self._follower.synced.is_set():
            return web.Response(status=503, text="the fleet is not known yet\n")
        return web.Response(text="ready\n")


def _json(content: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json")


def _number(request: web.Request, name: str, default: float) -> float:
    """A finite query parameter; 400 names one that is not."""
    text = request.query.get(name)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise web.HTTPBadRequest(text=f"{name} must be a number, not {text!r}\n")
    return number
