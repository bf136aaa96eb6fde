"""The loop around the policy: look at the gateways, decide, act, explain. Wakes at its tick, or at once when a hold begins."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import httpx
import msgspec

from penstock.api.fleet import PoolsView
from penstock.operator.autoscale.policy import Decision, Limits, Memory, Observation, Settings, decide
from penstock.operator.autoscale.signals import PoolSignals, choose_victims, pool_signals

logger = logging.getLogger(__name__)

POLL_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class PoolScale:
    """A pool that the user lets us scale, as its workload stands."""

    pool_id: str
    limits: Limits
    dry_run: bool
    replicas: int
    """What the workload is asked to have."""
    pending_ages_s: tuple[float, ...]
    """Ages of its replicas that are not ready."""


class Actuator(Protocol):
    """Where pools live: Kubernetes, or processes on this machine."""

    async def pools(self) -> Sequence[PoolScale]:
        """The pools to scale."""
        ...

    async def scale(self, pool_id: str, replicas: int, victims: Sequence[str]) -> None:
        """Sets the pool's size; where it shrinks, the replicas with the UIDs `victims` go, after they have been cordoned."""
        ...

    async def record(self, pool_id: str, current: int, decision: Decision, *, acted: bool, dry_run: bool) -> None:
        """Makes the decision visible: status, metrics, and an Event where something was done."""
        ...


Gateways = Callable[[], Awaitable[Sequence[str]]]
"""Gives the base URLs of all gateway processes."""


class Autoscaler:
    """Scales pools by what the gateways report.

    Args:
        gateways: Where `/pools` is answered, asked anew at each look.
        actuator: Where the pools live.
        settings: How the policy behaves.
        tick_s: Seconds between looks while nothing urgent happens.
    """

    def __init__(self, gateways: Gateways, actuator: Actuator, settings: Settings, tick_s: float = 5.0) -> None:
        self._gateways = gateways
        self._actuator = actuator
        self._settings = settings
        self._tick_s = tick_s
        self._memories: dict[str, Memory] = {}
        self._versions: dict[str, int] = {}

    async def run(self) -> None:
        """Looks and acts until cancelled; a failed look is logged, changes nothing and is followed by the next."""
        async with httpx.AsyncClient(timeout=self._tick_s + POLL_TIMEOUT_S) as client:
            while True:
                started = time.monotonic()
                views = await self._views(client)
                try:
                    await self._look(views)
                except Exception:
                    logger.exception("autoscaler: this look failed; all sizes stay as they are")
                # With no gateway to wait at, the tick is ours to keep.
                await asyncio.sleep(max(0.0, (0.5 if views else self._tick_s) - (time.monotonic() - started)))

    async def _views(self, client: httpx.AsyncClient) -> list[PoolsView]:
        """Every gateway's view; waits at the gateways for one tick unless one has something urgent."""
        urls = await self._gateways()
        if not urls:
            return []
        tasks = [asyncio.create_task(self._view(client, url, self._tick_s)) for url in urls]
        done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if waiting:  # one answered early: ask the others for what they have now
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            late = [url for url, task in zip(urls, tasks, strict=True) if task in waiting]
            rest = await asyncio.gather(*(self._view(client, url, 0.0) for url in late))
        else:
            rest = []
        views = [task.result() for task in done] + list(rest)
        return [view for view in views if view is not None]

    async def _view(self, client: httpx.AsyncClient, url: str, wait_s: float) -> PoolsView | None:
        parameters: dict[str, float] = {"timeout": wait_s}
        if wait_s and url in self._versions:
            parameters["after"] = self._versions[url]
        try:
            answer = await client.get(f"{url}/pools", params=parameters)
            view = msgspec.json.decode(answer.raise_for_status().content, type=PoolsView)
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            logger.warning("autoscaler: gateway %s does not answer /pools: %s", url, error)
            self._versions.pop(url, None)
            return None
        self._versions[url] = view.version
        return view

    async def _look(self, views: Sequence[PoolsView]) -> None:
        pools = await self._actuator.pools()
        known = {pool.pool_id for pool in pools}
        self._memories = {pool_id: memory for pool_id, memory in self._memories.items() if pool_id in known}
        for pool in pools:
            signals = pool_signals(views, pool.pool_id)
            seen = Observation(time.monotonic(), pool.replicas, pool.pending_ages_s, signals)
            memory = self._memories.get(pool.pool_id, Memory())
            decision, self._memories[pool.pool_id] = decide(seen, pool.limits, self._settings, memory)
            await self._act(pool, signals, decision)

    async def _act(self, pool: PoolScale, signals: PoolSignals | None, decision: Decision) -> None:
        acts = decision.replicas != pool.replicas and not pool.dry_run
        if acts:
            shrinks_by = max(pool.replicas - decision.replicas, 0)
            victims = choose_victims(signals, shrinks_by) if signals is not None else []
            logger.info("autoscaler: %s %d → %d: %s", pool.pool_id, pool.replicas, decision.replicas, decision.reason)
            await self._actuator.scale(pool.pool_id, decision.replicas, victims)
        await self._actuator.record(pool.pool_id, pool.replicas, decision, acted=acts, dry_run=pool.dry_run)
