"""A gateway under three times the load that saturates its picker: what it answers, what it refuses and in which order.

    make bench-overload                                 about a minute
    make bench-overload ARGS="--quick"                  a few seconds, at a rate that saturates nothing; writes no file
    make bench-overload ARGS="--times 5 --seconds 20"

One process is the gateway, with a queue of 256 requests (`--max-queued-requests`) in front of three simulated replicas of 36
places each. Another is the client: an Envoy's side of ext_proc over one connection, straight to the gateway's gRPC port. Each
request has a body of 2 kB with a prompt of its own; every fourth is less important (`"priority": 1`). The client also shows the
gateway the heads of the replicas' responses, as Envoy does, and has the replicas' event streams, which say what has ended.

1. Saturation: so many requests are open at a time, and the replicas answer at once. The rate is that of the picker.
2. Overload: three times that rate for some seconds, whatever the answers do. The replicas take half of the rate that saturates
   the picker, so that requests wait, and are refused when the queue is full. Latency counts from the moment when a request was
   to be sent. What the gateway does not read in time waits in the connection; it is sent nevertheless, and has to be settled.
3. The saturation rate again.
4. Order: with all places taken, requests fill the queue and run over; more important ones displace others; then places become
   free one by one.

"lost" are requests that are neither answered with a destination nor refused with a reason 60 s after the last was sent. The exit
status is 1 where one is lost, or any rule of the order is broken.
"""

import argparse
import asyncio
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.bench_gateway import picks_by
from benchmarks.gatewaybench import backend
from benchmarks.gatewaybench.arms import Gateway, Process, free_ports, gateway, running
from benchmarks.gatewaybench.engines import Engines
from benchmarks.gatewaybench.order import DISPLACED, FULL, disorder, impatient
from benchmarks.gatewaybench.streams import ANSWERED, LOST, Asked, Prompts, Streams, outcomes
from benchmarks.procfs import memory_bytes
from benchmarks.report import write_results
from penstock.api.load_report import LoadReport

REPLICAS, ROWS = 3, 32
PLACES = REPLICAS * (ROWS + ROWS // 8)
"""An engine may queue an eighth of its rows."""
REPORT = LoadReport(
    epoch=1, seq=1, max_num_seqs=ROWS, kv_blocks_total=40_000, kv_blocks_reclaimable=40_000, prefill_tokens_per_s=200_000.0,
    decode_step_s=0.01,
)  # fmt: skip
"""What a replica says. What it was sent and has not answered, the gateway knows itself."""
QUEUE = 256
LESS_IMPORTANT_EVERY = 4
TAKEN = 0.5
"""Of the rate that saturates the picker, what the replicas can take in the overload."""
TICK_S = 0.001
READY_S, LOST_S, SETTLE_S = 60.0, 60.0, 1.0
IMPORTANT, UNIMPORTANT = 60, 30
"""Requests of the order's second and third step."""


class Sizes(NamedTuple):
    """How long and how much."""

    seconds: float = 10.0
    saturation_s: float = 5.0
    warm_s: float = 3.0
    streams: int = 64
    times: float = 3.0
    rate: float | None = None
    """In place of what saturates the picker."""


QUICK = Sizes(seconds=1.0, saturation_s=0.5, warm_s=0.5, streams=8, rate=400.0)


def priority_of(number: int) -> int:
    """That of a request of the mix."""
    return int(number % LESS_IMPORTANT_EVERY == LESS_IMPORTANT_EVERY - 1)


async def connected(port: int) -> Streams:
    """A connection to a gateway that answers; raises TimeoutError."""
    prompts, loop = Prompts(), asyncio.get_running_loop()
    async with asyncio.timeout(READY_S):
        while True:
            with contextlib.suppress(OSError):
                _, streams = await loop.create_connection(lambda: Streams(prompts, REPORT), "127.0.0.1", port)
                asked = streams.ask(0, time.perf_counter())
                streams.flush()
                while streams.open:  # noqa: ASYNC110 - a connection for a benchmark has no more to wait for
                    await asyncio.sleep(0.01)
                if asked.outcome == ANSWERED:
                    return streams
                await streams.close()
            await asyncio.sleep(0.1)


async def replicas(streams: Streams, engines: Engines) -> None:
    """Answers what is due, and says so, until cancelled."""
    streams.on_answer = lambda asked: engines.finished(asked.served, asked.request_id)
    while True:
        now = time.perf_counter()
        streams.answer_due(now)
        streams.flush()
        engines.tick(now)
        await asyncio.sleep(TICK_S)


async def drained(streams: Streams, limit_s: float) -> None:
    """Returns when all requests are settled and answered, or the time is over."""
    until = time.perf_counter() + limit_s
    while (streams.open or streams.held) and time.perf_counter() < until:  # noqa: ASYNC110 - as above
        await asyncio.sleep(TICK_S)


async def saturation(streams: Streams, picker: Process, seconds: float, count: int) -> dict[str, float]:
    """Requests a second that are answered while `count` are open at any time, and the picker's CPU."""
    until, first, cpu = time.perf_counter() + seconds, len(streams.settled), picker.cpu_s()

    def again(_: Asked) -> None:
        if (now := time.perf_counter()) < until:
            streams.ask(priority_of(streams.count), now)

    streams.answer_after_s, streams.on_settled = 0.0, again
    for _ in range(count):
        again(streams.settled[-1])
    streams.flush()
    await asyncio.sleep(seconds)
    done, used = len(streams.settled) - first, picker.cpu_s() - cpu
    await drained(streams, LOST_S)
    streams.on_settled = lambda asked: None
    refused = outcomes(streams.settled[first:])
    if set(refused) != {ANSWERED}:
        raise RuntimeError(f"at saturation, with room for all: {refused}")
    return {
        "per_s": round(done / seconds),
        "picker_cpu_share": round(used / seconds, 2),
        "picker_cpu_us": round(used / done * 1e6),
    }


async def overload(streams: Streams, picker: Process, rate: float, seconds: float, answer_after_s: float) -> dict[str, Any]:
    """The figures of `rate` requests a second, sent whatever the answers do."""
    streams.answer_after_s = answer_after_s
    first, asked = len(streams.settled), list[Asked]()
    cpu, own = picker.cpu_s(), time.process_time()
    began = time.perf_counter()
    while (now := time.perf_counter()) < began + seconds:
        while len(asked) < (now - began) * rate:
            asked.append(streams.ask(priority_of(streams.count), began + len(asked) / rate))
        streams.flush()
        await asyncio.sleep(TICK_S)
    lasted = time.perf_counter() - began
    in_time, behind = len(streams.settled) - first, streams.unsent_bytes
    used = {"picker_cpu_share": picker.cpu_s() - cpu, "client_cpu_share": time.process_time() - own}
    await drained(streams, LOST_S)
    settled, drain_s = streams.settled[first:], time.perf_counter() - began - lasted
    figures: dict[str, Any] = {"offered": len(asked), "offered_per_s": round(len(asked) / lasted)}
    figures |= {"settled_per_s": round(in_time / lasted), "unread_mb": round(behind / 2**20, 1), "drain_s": round(drain_s, 2)}
    figures |= {name: round(value / lasted, 2) for name, value in used.items()}
    return figures | judged(asked, settled)


def judged(asked: list[Asked], settled: list[Asked]) -> dict[str, Any]:
    """What became of requests, how long it took, and in which order."""
    count = outcomes(asked)
    lost = sum(count.pop(it, 0) for it in (*LOST, "nothing yet"))
    answered, refused = count.pop(ANSWERED, 0), dict(sorted(count.items()))
    figures: dict[str, Any] = {"answered": answered, "refused": refused, "lost": lost}
    for priority in (0, 1):
        its = outcomes([it for it in asked if it.priority == priority])
        figures[f"answered_of_priority_{priority}"] = [its[ANSWERED], its.total()]
    for name, which in (("answer", [it for it in settled if it.outcome == ANSWERED]), ("refusal", _refused(settled))):
        figures |= {f"{name}_{q}_ms": value for q, value in _quantiles([it.settled - it.intended for it in which]).items()}
    return figures | {"disorder": vars(disorder(settled))}


def _refused(settled: list[Asked]) -> list[Asked]:
    return [it for it in settled if it.outcome not in (ANSWERED, *LOST)]


def _quantiles(latencies: list[float]) -> dict[str, float | None]:
    latencies.sort()
    at = {"p50": 0.5, "p99": 0.99}
    return {name: round(1000 * latencies[int(len(latencies) * q)], 1) if latencies else None for name, q in at.items()}


async def order(streams: Streams) -> dict[str, Any]:
    """Fills the places and the queue, runs over, displaces, and frees places one by one: how many of each, and the disorder."""
    first, streams.answer_after_s = len(streams.settled), None

    async def step(priority: int, count: int) -> list[Asked]:
        asked = [streams.ask(priority, time.perf_counter()) for _ in range(count)]
        streams.flush()
        await asyncio.sleep(SETTLE_S)
        return asked

    usual = await step(1, PLACES + QUEUE + UNIMPORTANT)
    over = outcomes(usual)[FULL]
    await step(0, IMPORTANT)
    displaced = outcomes(usual)[DISPLACED]
    refused = outcomes(await step(2, UNIMPORTANT))[FULL]
    filled = len(streams.settled)
    while streams.held:
        open_before = streams.open
        streams.answer(streams.held.popleft().asked)
        streams.flush()
        until = time.perf_counter() + LOST_S
        while open_before and streams.open == open_before and time.perf_counter() < until:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
    broken = disorder(streams.settled[first:])
    broken.impatient = impatient(streams.settled[filled:])
    expected = {"over": UNIMPORTANT, "displaced": IMPORTANT, "less_important_refused": UNIMPORTANT}
    figures = {"over": over, "displaced": displaced, "less_important_refused": refused}
    served = len(streams.settled) - filled
    return {
        **figures,
        "served_in_turn": served,
        "as_expected": figures == expected,
        "disorder": vars(broken),
        "lost": streams.open,
    }


@contextlib.contextmanager
def fleet() -> Iterator[tuple[Gateway, Engines]]:
    """A gateway with a short queue over simulated replicas: a process answers what the gateway asks of them."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))  # kept when something fails, with the logs
    port = free_ports(3)
    command = (sys.executable, "-m", "benchmarks.bench_overload", "--backend", str(port))
    addresses = [(f"127.1.0.{n + 1}", port) for n in range(REPLICAS)]
    flags = ("--max-queued-requests", str(QUEUE))
    log = folder / "log"
    with Engines(addresses, REPORT) as engines, running(log, *command), gateway("lean", addresses, folder, *flags) as ours:
        yield ours, engines
    shutil.rmtree(folder)


async def measure(ours: Gateway, engines: Engines, sizes: Sizes) -> dict[str, Any]:
    """All figures."""
    picker = ours.process
    streams = await connected(ours.grpc_port)
    busy = asyncio.create_task(replicas(streams, engines))
    await saturation(streams, picker, sizes.warm_s, sizes.streams)
    before = picker.memory_mb()
    measured = await saturation(streams, picker, sizes.saturation_s, sizes.streams)
    rate = sizes.rate or measured["per_s"]
    figures: dict[str, Any] = {"picks": picks_by(ours.http_port), "saturation": measured}
    figures |= {"queue": QUEUE, "places": PLACES, "replicas_take_per_s": round(TAKEN * rate), "times": sizes.times}
    figures |= await overload(streams, picker, sizes.times * rate, sizes.seconds, PLACES / (TAKEN * rate))
    after = picker.memory_mb()
    figures["saturation_after"] = await saturation(streams, picker, sizes.saturation_s, sizes.streams)
    figures["order"] = await order(streams)
    memory = {"before": before, "after": after, "most": memory_bytes(picker.pid, "VmHWM") / 2**20, "end": picker.memory_mb()}
    figures["memory_mb"] = {name: round(value) for name, value in memory.items()}
    busy.cancel()
    await streams.close()
    return figures


def table(figures: dict[str, Any]) -> Table:
    """What is printed."""
    shown = Table("figure", "value", title="The gateway's picker under overload")
    for name, value in figures.items():
        for key, part in value.items() if isinstance(value, dict) else [("", value)]:
            text = ", ".join(f"{of} {it}" for of, it in part.items()) if isinstance(part, dict) else str(part)
            shown.add_row(f"{name} {key}".strip(), text)
    return shown


def main() -> int:
    """Prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds, at a rate that saturates nothing; writes no file")
    parser.add_argument("--times", type=float, default=Sizes().times, help="of the saturation rate (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=Sizes().seconds, help="of overload (default: %(default)s)")
    parser.add_argument("--backend", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.backend is not None:
        asyncio.run(backend.serve(arguments.backend, events=False, report=REPORT))
    sizes = QUICK if arguments.quick else Sizes(seconds=arguments.seconds, times=arguments.times)
    with fleet() as (ours, engines):
        figures = uvloop.run(measure(ours, engines, sizes))
    console = Console(width=130)
    console.print(table(figures))
    if not arguments.quick:
        console.print(f"written to {write_results('overload', figures)}")
    ordered = figures["order"]
    broken = sum(figures["disorder"].values()) + sum(ordered["disorder"].values())
    return int(bool(figures["lost"] or ordered["lost"] or broken or not ordered["as_expected"]))


if __name__ == "__main__":
    raise SystemExit(main())
