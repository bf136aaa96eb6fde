"""`penstock capacity`: the replicas, devices and cost of each pool, and what holds it back. `rows` and `table` are pure."""

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.api.resources import InferenceModel
from penstock.operator.api import MODELS
from penstock.operator.command_line import CommandFailed
from penstock.operator.kubectl.cluster import Cluster
from penstock.operator.objects import Object


async def run(cluster: Cluster, options: argparse.Namespace) -> None:
    """Write the table to the terminal."""
    models = [it for it in await cluster.listed(MODELS) if options.model in (None, it["metadata"]["name"])]
    if not models:
        what = f"InferenceModel {options.model}" if options.model else "InferenceModel"
        raise CommandFailed(f"there is no {what} in {cluster.namespace or 'any namespace'}")
    Console(highlight=False).print(table(rows(models)))


@dataclass(frozen=True)
class Row:
    """One pool."""

    place: str
    """`namespace/model/pool`."""
    ready: int
    wanted: int
    warming: int
    draining: int
    most: int | None
    """The autoscaler's bound; None: it does not size the pool."""
    resource: str
    """The devices' resource; empty on the CPU."""
    devices: int
    """Devices of the existing replicas."""
    cost: int
    blocked: str
    """Why there are not more or newer replicas; empty: nothing holds the pool back."""


def rows(models: Iterable[Object]) -> list[Row]:
    """The pools of InferenceModels by place. A model whose spec cannot be read has none."""
    found: list[Row] = []
    for resource in models:
        try:
            model = InferenceModel.parse(resource)
        except ValueError:
            continue
        status: Object = resource.get("status", {})
        pools = {it["name"]: it for it in status.get("pools", [])}
        sized = {it["pool"]: it for it in status.get("scaling", [])}
        conditions = {it["type"]: it for it in status.get("conditions", [])}
        for pool in model.spec.pools:
            now: Object = pools.get(pool.name, {})
            ready, wanted = (int(it) for it in now.get("ready", "0/0").split("/"))
            there = ready + now.get("warming", 0) + now.get("draining", 0)
            found.append(
                Row(
                    place=f"{model.metadata.namespace}/{model.metadata.name}/{pool.name}",
                    ready=ready,
                    wanted=wanted,
                    warming=now.get("warming", 0),
                    draining=now.get("draining", 0),
                    most=None if pool.scaling is None else pool.scaling.max,
                    resource="" if pool.accelerator is None else pool.accelerator.resource,
                    devices=0 if pool.accelerator is None else there * pool.parallelism.devices,
                    cost=now.get("cost", 0),
                    blocked=_blocked(conditions, sized.get(pool.name, {})),
                )
            )
    return sorted(found, key=lambda row: row.place)


def _blocked(conditions: Object, scaling: Object) -> str:
    progressing: Object = conditions.get("Progressing", {})
    if progressing.get("reason") in ("RolloutBlocked", "ProgressDeadlineExceeded"):
        return str(progressing["reason"])
    constraint = str(scaling.get("constraint", ""))
    return constraint if constraint in ("Max", "Budget", "Pending", "UpRate", "Ratio", "NoData") else ""


def table(found: Sequence[Row]) -> Table:
    """The pools, and a line with the sums: devices by resource."""
    made = Table("POOL", "READY", "WARMING", "DRAINING", "MAX", "DEVICES", "COST", "HELD BACK BY", box=None, pad_edge=False)
    for column in made.columns[1:7]:
        column.justify = "right"
    sums: Counter[str] = Counter()
    for row in found:
        devices = f"{row.devices} {row.resource}" if row.resource else "–"
        most = "–" if row.most is None else str(row.most)
        style = "yellow" if row.ready < row.wanted else ""
        ready = Text(f"{row.ready}/{row.wanted}", style=style)
        numbers = [str(row.warming), str(row.draining), most, devices, str(row.cost)]
        made.add_row(row.place, ready, *numbers, Text(row.blocked, style="red"))
        if row.resource:
            sums[row.resource] += row.devices
    ready, wanted = (sum(values) for values in zip(*((row.ready, row.wanted) for row in found), strict=True))
    devices = ", ".join(f"{count} {resource}" for resource, count in sorted(sums.items())) or "–"
    moving = [str(sum(row.warming for row in found)), str(sum(row.draining for row in found))]
    made.add_section()
    made.add_row("all", f"{ready}/{wanted}", *moving, "", devices, str(sum(row.cost for row in found)), "", style="bold")
    return made
