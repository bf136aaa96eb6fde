"""The gateway's own HTTP: what the autoscaler, Prometheus, probes and people ask."""

import asyncio
import math
import time

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from penstock.gateway.extproc.decisions import KEPT, DecisionLog
from penstock.gateway.load.follower import FleetFollower

MAX_POLL_S = 60.0


class GatewayHttp:
    """`/pools`, `/debug/decisions`, `/metrics`, `/healthz`, `/readyz`."""

    def __init__(self, name: str, follower: FleetFollower, decisions: DecisionLog, registry: CollectorRegistry) -> None:
        self._name = name
        self._follower = follower
        self._decisions = decisions
        self._registry = registry
        self.stopping = False

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/pools", self._pools),
                web.get("/debug/decisions", self._last_decisions),
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
            ]
        )
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
        return _json(self._follower.state.pools(self._name, time.monotonic()))

    async def _last_decisions(self, request: web.Request) -> web.Response:
        """The last decisions, newest first. `?n=COUNT`."""
        count = int(_number(request, "n", KEPT))
        return _json(self._decisions.last(count))

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})

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
