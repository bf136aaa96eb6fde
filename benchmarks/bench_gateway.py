"""What the picker adds to a request: one Envoy binary, the same trivial replicas, and different ways to choose among them.

    make bench-gateway                                  about eight minutes
    make bench-gateway ARGS="--quick"                   one setting in place of five
    make bench-gateway ARGS="--setting 3x2kB --rounds 5"
    make bench-gateway ARGS="--peer llm-d --peer gaie"  also llm-d's router and the Gateway API Inference Extension's own picker

A setting is a number of replicas and the size of a body. Arms are measured side by side, each setting in all of them before the
next, and in each round again: a figure is the median of the rounds, and `spread` has the least and the most of the main ones. At
a rate, requests are sent at random times whatever the answers do, and latency counts from the intended moment; `+p50` and its
like are the arm's figures less those of Envoy's own round robin in the same round. "closed" is as many as 32 connections get
answered. CPU is that of each process, from /proc, less what it uses when idle (`idle_cpu`, per cent of a core: reports of all
replicas come in twice a second); `pick_us` is the picker's own clock around a pick, without tokenising. "no decision" is what an
exchange costs by itself: the gateway's front end and its Envoy, with replicas named in turn and no body read. Replicas are
addresses of 127.0.0.0/8 that share two processes. Each request has a prompt of its own: a piece of this repository's pages, by
the tokenizer of `examples/models/penstock-tiny`.

Peers are in their default configurations, which hash the prompt's bytes. They are built from their Go modules where they are
missing; `gaie` needs what e2e needs besides.
"""

import argparse
import asyncio
import contextlib
import json
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import grpc
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from benchmarks.gatewaybench import backend
from benchmarks.gatewaybench.arms import ARMS, BASELINE, Arm, Start, free_ports, running
from benchmarks.gatewaybench.load import CLOSED, Client, load
from benchmarks.gatewaybench.texts import requests
from benchmarks.report import write_results
from penstock.api import metrics

SECONDS, IDLE_S, CONNECTIONS, BACKENDS = 5.0, 2.0, 32, 2
READY_S = 60.0
QUANTILES = (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999))


SPREAD = ("per_s", "p50_ms", "+p50", "p99_ms", "picker_cpu_us")


class Setting(NamedTuple):
    """What is asked of all arms."""

    replicas: int
    body: str
    rates: tuple[int, ...] = (500, CLOSED)

    @property
    def name(self) -> str:
        """As `--setting` has it."""
        return f"{self.replicas}x{self.body.replace(' ', '')}"


SETTINGS = (
    Setting(3, "2 kB"),
    Setting(3, "16 kB"),
    Setting(100, "2 kB"),
    Setting(100, "16 kB"),
    Setting(1000, "2 kB", (300,)),
)
Peer = Callable[[Console], AbstractContextManager[Start]]
"""Makes an arm ready, for as long as the block runs."""
BY_NAME = {setting.name: setting for setting in SETTINGS}


def _gaie() -> tuple[str, Peer]:
    from benchmarks.peers.gaie.arm import NAME, gaie_arm

    return NAME, gaie_arm


def _llmd() -> tuple[str, Peer]:
    from benchmarks.peers.llmd.arm import NAME, llmd_arm

    return NAME, llmd_arm


PEERS: dict[str, Callable[[], tuple[str, Peer]]] = {"llm-d": _llmd, "gaie": _gaie}
"""Imported where they are asked for: they need the cluster tier's packages."""


def pick_s(http_port: int) -> tuple[float, float]:
    """(seconds, number) of all picks of a gateway."""
    with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/metrics") as answer:
        families = text_string_to_metric_families(answer.read().decode())
        values = {sample.name: sample.value for family in families for sample in family.samples}
    return values[f"{metrics.PICK_SECONDS}_sum"], values[f"{metrics.PICK_SECONDS}_count"]


def picks_by(http_port: int) -> str:
    """What makes a gateway's picks."""
    with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/version") as answer:
        return json.load(answer)["picks"]


async def answering(port: int) -> None:
    """Waits until a request through `port` is answered; raises TimeoutError."""
    async with asyncio.timeout(READY_S):
        while True:
            with contextlib.suppress(OSError, RuntimeError, asyncio.IncompleteReadError):
                client = Client(*await asyncio.open_connection("127.0.0.1", port), requests("2 kB"))
                await client.ask()
                return client.close()
            await asyncio.sleep(0.1)


def idle(arm: Arm) -> dict[str, float]:
    """CPU seconds a second that each process uses when nobody asks."""
    before = {part: process.cpu_s() for part, process in arm.processes.items()}
    time.sleep(IDLE_S)
    return {part: (process.cpu_s() - before[part]) / IDLE_S for part, process in arm.processes.items()}


def measure(arm: Arm, resting: dict[str, float], asked: Iterator[bytes], rate: int) -> dict[str, Any]:
    """The figures of one arm at one rate."""
    seconds, picks = pick_s(arm.http_port) if arm.http_port else (0.0, 0.0)
    before = {part: process.cpu_s() for part, process in arm.processes.items()}
    began = time.monotonic()
    latencies = asyncio.run(load(arm.port, rate, SECONDS, CONNECTIONS, asked))
    lasted, count = time.monotonic() - began, len(latencies)
    row: dict[str, Any] = {"rate": rate or "closed", "per_s": round(count / SECONDS)}
    row |= {f"{name}_ms": round(1000 * latencies[min(int(count * q), count - 1)], 2) for name, q in QUANTILES}
    for part, process in arm.processes.items():
        used = process.cpu_s() - before[part] - resting[part] * lasted
        row[f"{part}_cpu_us"] = max(round(used / (count + CONNECTIONS) * 1e6), 0)
        row[f"{part}_mb"] = round(process.memory_mb())
    if "picker" in resting:
        row["idle_cpu"] = round(100 * resting["picker"])
    if arm.http_port:
        later, more = pick_s(arm.http_port)
        row["pick_us"] = round((later - seconds) / (more - picks) * 1e6)
    return row


def run(arms: dict[str, Start], settings: list[Setting], rounds: int, console: Console) -> Iterator[dict[str, Any]]:
    """All rows, setting by setting."""
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))  # kept when something fails, with the logs
        port = free_ports(3)
        for n in range(BACKENDS):  # they share the port; one of them has the event stream
            which = "--backend" if n else "--first-backend"
            stack.enter_context(running(folder / "log", sys.executable, "-m", __spec__.name, which, str(port)))
        asyncio.run(answering(port))
        for setting in settings:
            addresses = [(f"127.1.{n // 250}.{n % 250 + 1}", port) for n in range(setting.replicas)]
            done: list[list[dict[str, Any]]] = []
            for number in range(rounds):
                rows: list[dict[str, Any]] = []
                for name, start in arms.items():
                    where = folder / f"{setting.name}-{number}-{len(rows)}"
                    where.mkdir()
                    with console.status(f"{name}: {setting.name}, round {number + 1}"), start(addresses, where) as arm:
                        rows += in_turn(name, arm, setting)
                done.append(added(rows))
            yield from middle(done)
        shutil.rmtree(folder)


def in_turn(name: str, arm: Arm, setting: Setting) -> list[dict[str, Any]]:
    """The rows of one arm in one round."""
    asked = requests(setting.body)
    asyncio.run(answering(arm.port))
    asyncio.run(load(arm.port, CLOSED, 1.0, CONNECTIONS, asked))  # all is loaded and connected
    resting = idle(arm)
    about = {"arm": name, "replicas": setting.replicas, "body": setting.body}
    if arm.http_port:
        about["picks"] = picks_by(arm.http_port)
    return [about | measure(arm, resting, asked, rate) for rate in setting.rates]


def added(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a setting, with what each arm adds to the baseline's latencies."""
    base = {row["rate"]: row for row in rows if row["arm"] == BASELINE}
    for row in rows:
        if row["arm"] != BASELINE and row["rate"] in base and row["rate"] != "closed":
            row |= {f"+{name}": round(row[f"{name}_ms"] - base[row["rate"]][f"{name}_ms"], 2) for name, _ in QUANTILES}
    return rows


def middle(rounds: list[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Each row once, with the medians of its figures over the rounds, and how far the main ones spread."""
    for same in zip(*rounds, strict=True):
        row = dict(same[0])
        numbers = [key for key, value in row.items() if isinstance(value, int | float) and key not in ("replicas", "rate")]
        row |= {key: round(median(it[key] for it in same), 2) for key in numbers}
        row["spread"] = {key: [min(it[key] for it in same), max(it[key] for it in same)] for key in SPREAD if key in row}
        yield row


def results_name(settings: list[str], arms: list[str]) -> str:
    """What a run of these is called, peers among the arms, so that it overwrites none of others."""
    return "-".join(["gateway", *settings, *(re.sub(r"\W+", "_", arm) for arm in arms)])


def main() -> int:
    """Prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arm", action="append", choices=list(ARMS), help="only these (default: all)")
    parser.add_argument("--quick", action="store_true", help="one setting; writes no file")
    parser.add_argument("--setting", action="append", choices=list(BY_NAME), help="only these (default: all)")
    parser.add_argument("--rounds", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--peer", action="append", choices=list(PEERS), default=[], help="also this one's picker")
    for flag in ("--backend", "--first-backend"):
        parser.add_argument(flag, type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if (port := arguments.first_backend or arguments.backend) is not None:
        asyncio.run(backend.serve(port, events=arguments.first_backend is not None))
    console = Console(width=170)
    arms = {name: ARMS[name] for name in arguments.arm or ARMS}
    with contextlib.ExitStack() as stack:
        for peer in arguments.peer:
            name, arm = PEERS[peer]()
            arms[name] = stack.enter_context(arm(console))
        names = arguments.setting or (["3x2kB"] if arguments.quick else list(BY_NAME))
        rows = list(run(arms, [BY_NAME[name] for name in names], arguments.rounds, console))
    columns = ["arm", "replicas", "body", "rate", "per_s", "p50_ms", "p99_ms", "+p50", "+p99", "+p99.9"]
    columns += ["envoy_cpu_us", "picker_cpu_us", "pick_us", "picker_mb", "idle_cpu"]
    table = Table(*columns, title="What the picker adds to a request")
    for row in rows:
        table.add_row(*[str(row.get(column, "")) for column in columns])
    console.print(table)
    if arguments.quick:
        return 0
    path = write_results(
        results_name(arguments.setting or [], [*(arguments.arm or []), *arguments.peer]),
        {"grpc": grpc.__version__, "rounds": arguments.rounds, "rows": rows},
    )
    console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
