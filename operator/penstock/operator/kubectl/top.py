"""`penstock top`: what each replica is doing, as the gateways see it. `merged` and `table` are pure."""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.api.fleet import PoolLoad, PoolsView, ReplicaLoad
from penstock.operator.command_line import CommandFailed
from penstock.operator.kubectl.cluster import Cluster, Gateways
from penstock.operator.kubectl.local import LocalGateway


async def run(cluster: Cluster | LocalGateway, options: argparse.Namespace) -> None:
    """Shows the table once, or again and again."""
    console = Console(highlight=False)

    async def look() -> Table:
        gateways = await cluster.gateways(options)
        if not gateways.views:
            raise CommandFailed(f"none of {gateways.asked} gateways in {options.system_namespace} answers")
        return table(gateways, cluster.namespace, options.model)

    if options.once or not console.is_terminal:
        console.print(await look())
        return
    with Live(await look(), console=console, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(options.every)
            live.update(await look(), refresh=True)


@dataclass
class Row:
    """One replica."""

    load: ReplicaLoad
    """Load from the gateway with the newest report."""
    in_flight: int
    """Requests, over all gateways."""


@dataclass
class PoolRows:
    """One pool."""

    held: int
    """Requests that wait at gateways for a replica."""
    rows: dict[tuple[str, int], Row]
    """Rows by UID and port."""


def merged(views: Sequence[PoolsView]) -> dict[str, PoolRows]:
    """Pools by ID, from what several gateways say: their own requests are added up, and of load reports the youngest counts."""
    pools: dict[str, PoolRows] = {}
    for load in (pool for view in views for pool in view.pools):
        pool = pools.setdefault(load.id, PoolRows(0, {}))
        pool.held += load.held
        _merge(pool.rows, load)
    return pools


def _merge(rows: dict[tuple[str, int], Row], pool: PoolLoad) -> None:
    for load in pool.replicas:
        row = rows.get((load.uid, load.port))
        if row is None:
            rows[load.uid, load.port] = Row(load, load.in_flight)
            continue
        row.in_flight += load.in_flight
        if _heard(load) < _heard(row.load):
            row.load = load


def _heard(load: ReplicaLoad) -> float:
    return float("inf") if load.report is None or load.report_age_s is None else load.report_age_s


def table(gateways: Gateways, namespace: str | None, model: str | None) -> Table:
    """Pools of a namespace (None: of all) and a model (None: of all), and below each its replicas."""
    silent = gateways.asked - len(gateways.views)
    caption = f"{silent} of {gateways.asked} gateways do not answer: their requests are not counted" if silent else None
    made = Table(
        "REPLICA", "STATE", "IN FLIGHT", "RUNNING", "WAITING", "KV", "PROMPT TOK/S", "OUTPUT TOK/S", "BLOCKS", "HEARD",
        box=None, pad_edge=False, caption=caption, caption_style="yellow",
    )  # fmt: skip
    for column in made.columns[2:]:
        column.justify = "right"
    for pool_id, pool in sorted(merged(gateways.views).items()):
        its_namespace, its_model = pool_id.split("/")[:2]
        if namespace not in (None, its_namespace) or model not in (None, its_model):
            continue
        held = Text(f"{pool.held} held", style="red") if pool.held else Text("")
        made.add_row(Text(pool_id, style="bold"), held, str(sum(row.in_flight for row in pool.rows.values())))
        for row in sorted(pool.rows.values(), key=lambda it: (it.load.name, it.load.port)):
            made.add_row(f"  {row.load.name}", _state(row.load), str(row.in_flight), *_figures(row.load))
    return made


def _state(load: ReplicaLoad) -> Text:
    if load.cordoned:
        return Text("cordoned", style="yellow")
    return Text("ready", style="green") if load.ready else Text("not ready", style="yellow")


def _figures(load: ReplicaLoad) -> Sequence[str]:
    report = load.report
    if report is None:
        return ("–",) * 5 + (str(load.resident_blocks), "never")
    return (
        str(report.num_requests_running),
        str(report.waiting),
        f"{report.kv_cache_usage_perc:.0%}",
        f"{report.prompt_tokens_per_s:.0f}",
        f"{report.generation_tokens_per_s:.0f}",
        str(load.resident_blocks),
        f"{load.report_age_s or 0:.1f}s ago",
    )
