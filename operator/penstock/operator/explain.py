"""`penstock explain MODEL`: why a model has the size that it has, and what another load would make of it.

Reads the InferenceModel, its Deployments and pods, and the gateways' `/pools`; then runs the autoscaler's own policy on them,
with what the status says was learned. `--local` reads the same of the system that `penstock up` runs. It changes nothing.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Awaitable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import msgspec
from kubernetes.aio.client import ApiException
from rich.console import Console
from rich.table import Table

from penstock.api import labels
from penstock.api.fleet import PoolsView
from penstock.kube.client import connect, usual_namespace
from penstock.operator.acceptance import accept
from penstock.operator.ages import age_s
from penstock.operator.api import ServerApi, said
from penstock.operator.autoscale.coldstart import Starting
from penstock.operator.autoscale.learned import Learned, restore
from penstock.operator.autoscale.limits import ModelLimits, Settings
from penstock.operator.autoscale.policy import PoolView
from penstock.operator.autoscale.signals import pool_signals
from penstock.operator.autoscale.spec import model_limits
from penstock.operator.autoscale.whatif import Outlook, outlook, scaled
from penstock.operator.command_line import CommandFailed, add_namespace, add_server, run
from penstock.operator.desired import child_name
from penstock.operator.kubectl.local import LocalGateway, local_gateway
from penstock.operator.local.told import ToldModel, named
from penstock.operator.objects import as_pods
from penstock.operator.pods import is_live, is_ready, trouble
from penstock.operator.scaling import restored

GATEWAY = "penstock-gateway:http"

Size = tuple[int, tuple[Starting, ...]]
"""The replicas that a pool is asked to have, and those that are not ready."""


@dataclass(frozen=True)
class Seen:
    """A model where it runs."""

    resource: dict[str, Any]
    view: PoolsView | None
    """What a gateway says; None where none answers."""
    sizes: Mapping[str, Size]
    """Sizes by name, of the pools that have `scaling`."""


def main(argv: list[str]) -> int:
    """The command; its exit code is that of `command_line.run`."""
    args = parser().parse_args(argv)
    if args.local and args.gateway:
        parser().error("--gateway is for clusters: --local finds the gateway itself")

    async def explain() -> None:
        story = await story_of(args)
        if args.output == "json":
            sys.stdout.write(json.dumps(story, indent=2) + "\n")
        else:
            _show(story, Console())

    return run("penstock explain", explain)


def _factor(text: str) -> float:
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)x?", text)
    if not found or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no load such as 2x or 0.5x")
    return float(found[1])


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="penstock explain", description="Says why a model has the size that it has.")
    add = made.add_argument
    add("model", help="name of the InferenceModel; with --local also a served name")
    where = made.add_mutually_exclusive_group()
    add_namespace(where)
    where.add_argument("--local", action="store_true", help="explain what `penstock up` runs on this machine, not a cluster")
    add("--load", type=_factor, default=1.0, metavar="TIMES", help="show the size for this multiple of the load, such as 2x")
    add_server(made)
    add("--system-namespace", default="penstock-system", help="namespace of the gateways (default: %(default)s)")
    add("--gateway", metavar="URL", help="a gateway's HTTP address (default: its Service, through the API server)")
    add("-o", "--output", choices=["table", "json"], default="table")
    return made


async def story_of(args: argparse.Namespace) -> dict[str, Any]:
    """All that the command tells, as JSON has it.

    Raises:
        CommandFailed: there is nothing to explain.
        ApiException: the API server refused.
    """
    return story(await (_here(args.model) if args.local else _on_cluster(args)), args.load, time.time())


def story(seen: Seen, load: float, wall: float) -> dict[str, Any]:
    """Explain a model that was read.

    Args:
        seen: The objects that were read.
        load: Factor on the present load.
        wall: Unix time in seconds.
    """
    resource, limits = seen.resource, _limits(seen.resource)
    model_id = f"{resource['metadata'].get('namespace', 'default')}/{resource['metadata']['name']}"
    views: dict[str, PoolView] = {}
    for name, (replicas, starting) in seen.sizes.items():
        signals = None if seen.view is None else pool_signals([seen.view], f"{model_id}/{name}")
        views[name] = PoolView(replicas, starting, None if signals is None else scaled(signals, load))
    learned = restored(resource)
    memories = {name: restore(it) for name, it in learned.items() if name in limits.pools}
    prospects = outlook(views, limits, Settings(), memories, wall)
    status = {it["pool"]: it for it in resource.get("status", {}).get("scaling", [])}
    return {
        "model": model_id,
        "load": load,
        "gateway": seen.view is not None,
        "pools": [_tell(name, views[name], limits, prospects[name], status.get(name, {}), learned) for name in sorted(views)],
    }


def _limits(resource: dict[str, Any]) -> ModelLimits:
    """What the autoscaler may do; raises `CommandFailed` where it has nothing to do."""
    model, refusal = accept(resource)
    if model is None or refusal is not None:
        raise CommandFailed(f"the operator refuses it: {refusal.message if refusal else ''}")
    limits = model_limits(model)
    if not limits.pools:
        raise CommandFailed("no pool has scaling: its size is spec.replicas, or whatever scales its Deployment")
    return limits


async def _on_cluster(args: argparse.Namespace) -> Seen:
    namespace = args.namespace or usual_namespace(args.kubeconfig, args.context)
    client = await connect(args.kubeconfig, args.context)
    try:
        api = ServerApi(client)
        resource = await api.get("InferenceModel", namespace, args.model)
        if resource is None:
            raise CommandFailed(f"there is no InferenceModel {namespace}/{args.model}")
        sizes = {name: await _size(api, namespace, args.model, name) for name in _limits(resource).pools}
        return Seen(resource, await _answer(_view(api, args), hint="; see --gateway"), sizes)
    finally:
        await client.close()


async def _here(name: str) -> Seen:
    gateway = local_gateway()
    told = named(msgspec.convert(await gateway.asked("/models", gateway.system.own), list[ToldModel]), name)
    sizes = {pool: it.size for pool, it in told.pools.items() if pool in _limits(told.resource).pools}
    return Seen(told.resource, await _answer(_local_view(gateway)), sizes)


async def _answer(asked: Awaitable[PoolsView], hint: str = "") -> PoolsView | None:
    """One gateway's view; None where none answers."""
    try:
        return await asked
    except (ApiException, aiohttp.ClientError, TimeoutError, ValueError, msgspec.MsgspecError) as error:
        words = said(error) if isinstance(error, ApiException) else error
        sys.stderr.write(f"penstock explain: no gateway answers ({words}){hint}. Demand is unknown.\n")
        return None


async def _view(api: ServerApi, args: argparse.Namespace) -> PoolsView:
    if not args.gateway:
        return msgspec.convert(await api.proxied(args.system_namespace, GATEWAY, "/pools"), PoolsView)
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(5.0)) as session,
        session.get(f"{args.gateway}/pools") as answer,
    ):
        return msgspec.json.decode(await answer.read(), type=PoolsView)


async def _local_view(gateway: LocalGateway) -> PoolsView:
    return msgspec.convert(await gateway.asked("/pools"), PoolsView)


async def _size(api: ServerApi, namespace: str, model: str, name: str) -> Size:
    workload = await api.get("Deployment", namespace, child_name(model, name))
    pods = as_pods(await api.listed("Pod", namespace, f"{labels.MODEL}={model},{labels.POOL}={name}"))
    starting = tuple(Starting(age_s(pod), trouble(pod) is not None) for pod in pods if is_live(pod) and not is_ready(pod))
    return (workload or {}).get("spec", {}).get("replicas", 0), starting


def _tell(
    name: str, view: PoolView, limits: ModelLimits, prospect: Outlook, status: dict[str, Any], learned: dict[str, Learned]
) -> dict[str, Any]:
    its = limits.pools[name]
    return {
        "pool": name,
        "role": its.role,
        "min": its.min_replicas,
        "max": its.max_replicas,
        "replicas": view.replicas,
        "starting": len(view.starting),
        "next": {"replicas": prospect.next.replicas, "constraint": prospect.next.constraint, "reason": prospect.next.reason},
        "settles": {"replicas": prospect.settled.replicas, "constraint": prospect.settled.constraint},
        "signals": dict(prospect.next.inputs),
        "learned": asdict(learned[name]) if name in learned else None,
        "autoscaler": {key: status[key] for key in ("desired", "constraint", "reason", "decisions") if key in status},
        "would_change": would_change(prospect, its.min_replicas, its.max_replicas),
    }


def would_change(prospect: Outlook, least: int, most: int) -> str:
    """What would make the pool another size than the one at which it settles."""
    size, demand = prospect.settled.replicas, prospect.settled.inputs.get("demand")
    match prospect.settled.constraint:
        case "NoData":
            return "a gateway, or its replicas, that say how loaded they are"
        case "Max" | "Budget" | "Ratio" | "Schedule":
            bound = {"Max": f"max above {most}", "Budget": "a larger budget", "Ratio": "another ratio", "Schedule": "its end"}
            return bound[prospect.settled.constraint]
        case _ if demand:
            more = f"{size + 1} from {max(size, 1) * 1.1 / demand:.2f} times this load on"
            less = f", {size - 1} below {(size - 1) / demand:.2f} times" if size - 1 >= max(least, 1) else ""
            return more + less
        case _:
            return "any request"


def _show(story: dict[str, Any], console: Console) -> None:
    times = "" if story["load"] == 1 else f" under {story['load']:g} times the load"
    table = Table("pool", "role", "replicas", "starting", "next", "settles at", "bound by", title=f"{story['model']}{times}")
    for pool in story["pools"]:
        row = (
            pool["replicas"],
            pool["starting"],
            pool["next"]["replicas"],
            pool["settles"]["replicas"],
            pool["settles"]["constraint"],
        )
        table.add_row(pool["pool"], pool["role"], *map(str, row))
    console.print(table)
    for pool in story["pools"]:
        console.print(f"[bold]{pool['pool']}[/bold] ({pool['min']} to {pool['max']}): {pool['next']['reason']}")
        console.print(f"  would be another size: {pool['would_change']}")
        signals = ", ".join(f"{name} {value:g}" for name, value in pool["signals"].items() if value)
        console.print(f"  signals: {signals or 'none'}", highlight=False)
        learned = pool["learned"] or {}
        console.print(
            "  learned: " + (", ".join(f"{k} {v:g}" for k, v in learned.items() if v) or "nothing yet"), highlight=False
        )
        for line in pool["autoscaler"].get("decisions", [])[:3]:
            console.print(f"  {line}", style="dim", highlight=False)
