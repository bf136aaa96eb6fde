"""The loop around the policy: look at the gateways, decide, act, explain. Wakes at its tick, or at once when a hold begins."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import httpx
import msgspec

from penstock.api.fleet import PoolsView
from penstock.operator.autoscale.bounds import Decision
from penstock.operator.autoscale.coldstart import Starting
from penstock.operator.autoscale.fallback import LoadClient, ask_replicas
from penstock.operator.autoscale.learned import Learned, extract, restore
from penstock.operator.autoscale.limits import ModelLimits, Settings
from penstock.operator.autoscale.namespace_budget import NamespaceBudgets
from penstock.operator.autoscale.policy import Memory, Observation, PoolView, decide
from penstock.operator.autoscale.signals import PoolSignals, choose_victims, pool_signals

logger = logging.getLogger(__name__)

POLL_TIMEOUT_S = 3.0
AT_ONCE = 8
"""Models: one whose replicas keep it waiting must not keep the others waiting."""


@dataclass(frozen=True)
class PoolScale:
    """A pool that the user lets us scale, as its workload stands."""

    replicas: int
    """What the workload is asked to have."""
    starting: tuple[Starting, ...]
    """Replicas that are not ready."""
    started_s: tuple[float, ...] = ()
    """Seconds that replicas took which have become ready for the first time since the last look."""
    endpoints: Mapping[str, str] = field(default_factory=dict[str, str])
    """Base URLs of its ready replicas by UID, to be asked where no gateway knows how they are."""
    dry_run: bool = False
    learned: Learned | None = None
    """What an earlier autoscaler left."""


@dataclass(frozen=True)
class ModelScale:
    """A model with pools that the user lets us scale."""

    id: str
    """`namespace/name`."""
    limits: ModelLimits
    pools: Mapping[str, PoolScale]
    """Existing pools by name; a subset of those in `limits`."""


@dataclass(frozen=True)
class Record:
    """A decision, to be told."""

    pool_id: str
    """`namespace/model/pool`."""
    current: int
    """Replicas before."""
    decision: Decision
    learned: Learned
    acted: bool
    dry_run: bool


class Actuator(Protocol):
    """The place that runs pools: Kubernetes, or processes on this machine."""

    async def targets(self) -> Sequence[ModelScale]:
        """What there is to scale."""
        ...

    async def scale(self, pool_id: str, replicas: int, victims: Sequence[str]) -> None:
        """Sets the pool's size; where it shrinks, the replicas with the UIDs `victims` go, after they have been cordoned."""
        ...

    async def spare(self, pool_id: str) -> None:
        """Ends the cordon of replicas that have not gone and need not go any more."""
        ...

    async def record(self, record: Record) -> None:
        """Makes a decision visible: status, metrics, and an Event where something was done."""
        ...


Gateways = Callable[[], Awaitable[Sequence[str]]]
"""Gives the base URLs of all gateway processes."""
Listener = Callable[[Sequence[PoolsView], int], None]
"""Told at each look what the gateways said, and how many were asked."""


def _nobody(views: Sequence[PoolsView], asked: int) -> None:
    """Ignore the views: no listener is set."""


class Autoscaler:
    """Scales pools by what the gateways report.

    Args:
        gateways: URLs that answer `/pools`, resolved again at each observation.
        replicas: Client for replicas that the gateways do not know.
        actuator: The place that runs the pools.
        settings: Settings of the policy.
        tick_s: Seconds between observations while nothing urgent happens.
        told: Called with the gateways' answers.
        budgets: By namespace, the most that the replicas of all its models may cost together.
    """

    def __init__(
        self,
        gateways: Gateways,
        replicas: LoadClient,
        actuator: Actuator,
        settings: Settings,
        tick_s: float = 5.0,
        told: Listener = _nobody,
        budgets: Mapping[str, float] | None = None,
    ) -> None:
        self._gateways = gateways
        self._replicas = replicas
        self._actuator = actuator
        self._settings = settings
        self._tick_s = tick_s
        self._told = told
        self._budgets = NamespaceBudgets(budgets or {})
        self._memories: dict[str, Memory] = {}
        self._versions: dict[str, int] = {}

    async def run(self) -> None:
        """Looks and acts until cancelled; a failed look is logged, changes nothing and is followed by the next."""
        async with httpx.AsyncClient() as client:
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
            self._told([], 0)
            return []
        tasks = {asyncio.create_task(self._view(client, url, self._tick_s)): url for url in urls}
        waiting, views = set(tasks), list[PoolsView]()
        while waiting and not views:  # one that fails has nothing urgent
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            views = [view for task in done if (view := task.result()) is not None]
        if waiting:  # one answered early: ask the others for what they have now
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            rest = await asyncio.gather(*(self._view(client, tasks[task], 0.0) for task in waiting))
            views += [view for view in rest if view is not None]
        self._told(views, len(urls))
        return views

    async def _view(self, client: httpx.AsyncClient, url: str, wait_s: float) -> PoolsView | None:
        parameters: dict[str, float] = {"timeout": wait_s}
        if wait_s and url in self._versions:
            parameters["after"] = self._versions[url]
        try:
            answer = await client.get(f"{url}/pools", params=parameters, timeout=wait_s + POLL_TIMEOUT_S)
            view = msgspec.json.decode(answer.raise_for_status().content, type=PoolsView)
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            logger.warning("autoscaler: gateway %s does not answer /pools: %s", url, error)
            self._versions.pop(url, None)
            return None
        self._versions[url] = view.version
        return view

    async def _look(self, views: Sequence[PoolsView]) -> None:
        models = await self._actuator.targets()
        known = {model.id for model in models}
        self._memories = {model_id: memory for model_id, memory in self._memories.items() if model_id in known}
        self._budgets.begin({model.id: _cost(model, {}) for model in models})
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(model: ModelScale) -> None:
            async with limit:
                try:
                    await self._look_at(model, views)
                except Exception:  # one model's failure is that model's
                    logger.exception("autoscaler: looking at %s failed; its sizes stay as they are", model.id)

        await asyncio.gather(*(one(model) for model in models))

    async def _look_at(self, model: ModelScale, views: Sequence[PoolsView]) -> None:
        signals = {name: pool_signals(views, f"{model.id}/{name}") for name in model.pools}
        for name, pool in model.pools.items():
            signals[name] = await ask_replicas(self._replicas, pool.endpoints, signals[name], self._settings.stale_after_s)
        decisions = self._decide(model, signals)
        for name, decision in decisions.items():
            await self._act(model, name, signals[name], decision)

    def _decide(self, model: ModelScale, signals: Mapping[str, PoolSignals | None]) -> dict[str, Decision]:
        seen = Observation(
            time.monotonic(),
            time.time(),
            {name: PoolView(pool.replicas, pool.starting, signals[name], pool.started_s) for name, pool in model.pools.items()},
        )
        memory = self._memories.get(model.id)
        if memory is None:
            memory = Memory(pools={name: restore(pool.learned) for name, pool in model.pools.items() if pool.learned is not None})
        limits = replace(model.limits, room=self._budgets.room(model.id))
        decisions, self._memories[model.id] = decide(seen, limits, self._settings, memory)
        acting = {name: it.replicas for name, it in decisions.items() if not model.pools[name].dry_run}
        self._budgets.spend(model.id, _cost(model, acting))
        return decisions

    async def _act(self, model: ModelScale, name: str, signals: PoolSignals | None, decision: Decision) -> None:
        pool, pool_id = model.pools[name], f"{model.id}/{name}"
        acts = decision.replicas != pool.replicas and not pool.dry_run
        if acts:
            victims: list[str] = []
            if signals is not None and decision.replicas < pool.replicas:
                victims = choose_victims(signals, pool.endpoints.keys(), decision.replicas)
            logger.info("autoscaler: %s %d → %d: %s", pool_id, pool.replicas, decision.replicas, decision.reason)
            await self._actuator.scale(pool_id, decision.replicas, victims)
        else:
            await self._actuator.spare(pool_id)
        learned = extract(self._memories[model.id].pools[name])
        await self._actuator.record(Record(pool_id, pool.replicas, decision, learned, acted=acts, dry_run=pool.dry_run))


def _cost(model: ModelScale, sizes: Mapping[str, int]) -> float:
    """What a model's replicas cost, with these sizes of pools and the present sizes of the others."""
    return sum(sizes.get(name, pool.replicas) * model.limits.pools[name].cost for name, pool in model.pools.items())
