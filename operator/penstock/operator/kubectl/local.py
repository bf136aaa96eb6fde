"""The system of `penstock up` as `penstock top --local` and `status --local` show it. `trees` is pure."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from penstock.api.fleet import PoolsView
from penstock.local_system import LocalSystem, running
from penstock.operator.command_line import CommandFailed
from penstock.operator.kubectl.cluster import Gateways
from penstock.operator.kubectl.tree import GOOD, QUIET, WAITING, Node, show

TIMEOUT = aiohttp.ClientTimeout(total=5.0)


@dataclass(frozen=True)
class LocalGateway:
    """The one gateway of a local system, in the place of a `Cluster`."""

    system: LocalSystem
    namespace: str | None = None

    async def gateways(self, options: argparse.Namespace) -> Gateways:
        """What it says."""
        view = msgspec.convert(await self.asked("/pools"), PoolsView)
        return Gateways(1, [view])

    async def asked(self, path: str, base: str = "") -> Any:
        """The JSON at a path of the gateway, or of another base URL; raises aiohttp's errors."""
        async with aiohttp.ClientSession(timeout=TIMEOUT) as session, session.get((base or self.system.gateway) + path) as answer:
            answer.raise_for_status()
            return msgspec.json.decode(await answer.read())


def local_gateway() -> LocalGateway:
    """The gateway of the system that runs; raises `CommandFailed` where there is none."""
    try:
        system = running()
    except ValueError as error:
        raise CommandFailed(str(error)) from None
    if system is None:
        raise CommandFailed("no system of penstock up runs on this machine")
    return LocalGateway(system)


async def status(gateway: LocalGateway, options: argparse.Namespace) -> None:
    """Writes the trees to the terminal."""
    view = (await gateway.gateways(options)).views[0]
    models = await gateway.asked("/debug/models")
    found = trees(view, models, gateway.system.url, options.model)
    if not found:
        raise CommandFailed(f"there is no model {options.model}" if options.model else "the gateway knows no model yet")
    show(found)


def trees(view: PoolsView, models: Mapping[str, Any], url: str, model: str | None) -> list[Node]:
    """One tree a model, by its id.

    Args:
        view: `/pools`.
        models: `/debug/models`.
        url: Where clients reach them.
        model: Only the one of this name; None: all.
    """
    names: dict[str, list[str]] = {}
    for name, it in models["names"].items():
        names.setdefault(it["model"], []).append(name)
    made = []
    for model_id in sorted({pool.model for pool in view.pools}):
        if model not in (None, model_id.rpartition("/")[2], *names.get(model_id, [])):
            continue
        pools = [_pool(pool, models["scaling"].get(pool.id)) for pool in view.pools if pool.model == model_id]
        served = Node(f"served as {', '.join(names.get(model_id, []))}", QUIET)
        good = all(pool.style == GOOD for pool in pools)
        made.append(Node(f"{model_id}  {url}", f"bold {GOOD if good else WAITING}", [served, *pools]))
    return made


def _pool(pool: Any, scaling: str | None) -> Node:
    ready = sum(it.ready for it in pool.replicas)
    below = [] if scaling is None else [Node(f"autoscaler: {scaling}", QUIET)]
    for it in sorted(pool.replicas, key=lambda it: it.name):
        state = "cordoned" if it.cordoned else "Ready" if it.ready else "Starting"
        below.append(Node(f"{it.name}  {state}", GOOD if state == "Ready" else WAITING))
    counts = f"{ready}/{len(pool.replicas)}"
    style = GOOD if pool.replicas and ready == len(pool.replicas) else WAITING
    return Node(f"pool {pool.id.rpartition('/')[2]}  {counts}", style, below)
