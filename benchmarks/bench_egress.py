"""What a token costs the frontend: CPU time of its process alone, while clients read streams of the demo model.

    make bench-egress

The frontend turns the core's frames into text and events; with many streams on a fast device its CPU is what gives out first. Its
CPU seconds are read from /proc, so other work on the machine changes them little. Each row is one burst of streams, with whatever
they cost besides tokens (HTTP, tokenizer) in it; the last rows stop by a string and tell how many tokens the core sampled in vain
until it heard of it. The second table tells the two apart, from short answers and long ones, for each of the process's threads.
"""

import argparse
import asyncio
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from procfs import cpu_times
from report import write_results
from rich.console import Console
from rich.table import Table

MODEL = Path(__file__).parent.parent / "examples/models/penstock-tiny"
STREAMS = (1, 16, 64, 128)
OUTPUT = 96
SHORT, LONG, REPEATS = 8, 200, 3
"""Answers that the cost of a token and of a request follow from: tokens of each, and how often; the median counts."""
SETTLE_S = 0.5
"""Until the core's newest report is here."""
PORTS = (18471, 18472, 18473)
Row = dict[str, Any]


def cpu_seconds(pid: int) -> Counter[str]:
    """CPU time of one process without its children: of each kind of thread, together (`all`), and as `user` and `system`, which
    the kernel tells in ticks of its clock alone."""
    seconds: Counter[str] = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        used = int((task / "schedstat").read_text().split()[0]) / 1e9
        kind = "event loop" if task.name == str(pid) else "other threads"
        seconds += Counter({kind: used, "all": used})
    return seconds + Counter(dict(zip(("user", "system"), cpu_times(pid), strict=False)))


class Work(NamedTuple):
    """What a server did between two moments."""

    cpu: Counter[str]
    """Seconds, as `cpu_seconds` has them."""
    wall: float
    requests: int
    tokens: int
    events: int


@asynccontextmanager
async def serving(*more: str) -> AsyncIterator[tuple[aiohttp.ClientSession, int]]:
    """A ready server: a client of it, and the frontend's process id."""
    port, events, replay = map(str, PORTS)
    flags = ["--port", port, "--events-port", events, "--replay-port", replay, "--served-model-name", "bench"]
    command = [sys.executable, "-m", "penstock.cli", "serve", str(MODEL), *flags, "--kv-cache-memory-bytes", str(2**26), *more]
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        try:
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector) as client:
                await wait_ready(client, process)
                yield client, process.pid
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def wait_ready(client: aiohttp.ClientSession, process: asyncio.subprocess.Process) -> None:
    """Returns when the server takes requests; raises `RuntimeError` when it ends instead."""
    async with asyncio.timeout(120):
        while process.returncode is None:
            try:
                async with client.get("/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientConnectionError:  # not listening yet
                pass
            await asyncio.sleep(0.2)
    raise RuntimeError(f"the server ended with status {process.returncode}")


async def answer(client: aiohttp.ClientSession, number: int, body: dict[str, Any]) -> tuple[int, int]:
    """One request: its tokens by the server's count, and its events."""
    prompt = f"json.dumps {number}"
    async with client.post("/v1/completions", json={"model": "bench", "prompt": prompt, "seed": number, **body}) as response:
        response.raise_for_status()
        data = await response.read()
    [tokens] = re.findall(rb'"completion_tokens":(\d+)', data)
    return int(tokens), data.count(b"data: {")


async def burst(client: aiohttp.ClientSession, pid: int, streams: int, label: str, **body: Any) -> Row:
    """So many requests at once, twice; the first time is to warm up."""
    usage = {"stream_options": {"include_usage": True}} if body.get("stream") else {}
    full = {"max_tokens": OUTPUT, "ignore_eos": True, **usage, **body}
    await asyncio.gather(*(answer(client, at, full) for at in range(streams)))
    await asyncio.sleep(SETTLE_S)
    sampled = await sampled_tokens(client)
    work = await answers(client, pid, streams, max(1, 64 // streams), full)
    await asyncio.sleep(SETTLE_S)
    wasted = await sampled_tokens(client) - sampled - work.tokens
    return {
        "what": label,
        "streams": streams,
        "tokens": work.tokens,
        "events": work.events,
        "frontend_us_per_token": round(work.cpu["all"] / work.tokens * 1e6, 1),
        "tok_per_s": round(work.tokens / work.wall),
        "wasted_tokens_per_request": round(wasted / work.requests, 2),
    }


async def answers(client: aiohttp.ClientSession, pid: int, streams: int, rounds: int, body: dict[str, Any]) -> Work:
    """So many requests at once, so many times."""
    cpu, wall = cpu_seconds(pid), time.perf_counter()
    done: list[tuple[int, int]] = []
    for at in range(rounds):
        done += await asyncio.gather(*(answer(client, 1000 * at + k, body) for k in range(streams)))
    cpu, wall = cpu_seconds(pid) - cpu, time.perf_counter() - wall
    return Work(cpu, wall, len(done), sum(tokens for tokens, _ in done), sum(events for _, events in done))


async def parts(client: aiohttp.ClientSession, pid: int, streams: int = 64) -> list[Row]:
    """What one more token costs, and what a request does without its tokens, by thread and by mode."""
    body = {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    names = ("all", "event loop", "other threads", "user", "system")
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(REPEATS):
        short = await answers(client, pid, streams, 4, body | {"max_tokens": SHORT})
        long = await answers(client, pid, streams, 1, body | {"max_tokens": LONG})
        for name, costs in found.items():
            each = short.cpu[name] / short.requests
            token = (long.cpu[name] / long.requests - each) / (LONG - SHORT)
            costs.append((token, each - SHORT * token))
    rows: list[Row] = []
    for name, costs in found.items():
        token, request = (round(statistics.median(column) * 1e6, 1) for column in zip(*costs, strict=True))
        rows.append({"part": name, "us_per_token": token, "us_per_request": request})
    return rows


async def sampled_tokens(client: aiohttp.ClientSession) -> float:
    """Tokens that the core has sampled since the start."""
    async with client.get("/metrics") as response:
        text = await response.text()
    [value] = re.findall(r"^penstock_sampled_tokens_total{[^}]*} (\S+)$", text, re.MULTILINE)
    return float(value)


async def measure() -> tuple[list[Row], list[Row]]:
    """The rows of both tables, from a server that sends each token and one that gathers four."""
    async with serving("--stream-interval", "4") as (client, pid):
        gathered = await burst(client, pid, 64, "stream, interval 4", stream=True)
    async with serving() as (client, pid):
        rows = [await burst(client, pid, streams, "stream", stream=True) for streams in STREAMS]
        split = await parts(client, pid)
        rows.append(await burst(client, pid, 64, "stream, logprobs", stream=True, logprobs=2))
        rows.append(await burst(client, pid, 64, "stream, stop strings", stream=True, stop=["never there", "\n\n\n\n"]))
        rows += [gathered, await burst(client, pid, 64, "whole answers")]
        rows += [await burst(client, pid, n, "ended by a stop string", stream=True, stop=["a", "e"]) for n in (1, 64)]
    return rows, split


def show(rows: list[Row], split: list[Row], console: Console) -> None:
    """The tables."""
    heads = ("", "streams", "tokens", "events", "frontend µs/token", "tok/s", "wasted tokens/request")
    table = Table(*heads, title=f"frontend CPU a token, {OUTPUT} tokens a request")
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table)
    table = Table(
        "", "µs/token", "µs/request", title="frontend CPU at 64 streams: one more token, and a request without its tokens"
    )
    for row in split:
        table.add_row(*map(str, row.values()))
    console.print(table)


def main() -> int:
    """Prints the table and writes the JSON."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    console = Console()
    with console.status("serving the demo model"):
        rows, split = asyncio.run(measure())
    show(rows, split, console)
    path = write_results("egress", {"rows": rows, "parts": split})
    console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
