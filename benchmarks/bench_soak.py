"""Does a replica leak? Mixed traffic with aborts, bad requests and killed cores against one `penstock serve`.

    make bench-soak                        30 minutes
    make bench-soak ARGS="--minutes 1"     a smoke test, too short for a verdict on memory

Streams and whole answers, several choices, logprobs, long prompts and shared prefixes, clients that go, requests that are
refused. At a tenth and a fifth of the time the core is killed: its server must end by itself, and is started again. Over the
last life of the server, without its first quarter, memory must not rise; at rest no block may be in use, no file descriptor more
be open than before the traffic, and nothing be left in the temporary folder. The verdict is the exit status.
"""

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import aiohttp
import numpy as np
from peers.ports import free_ports
from procfs import children, memory_bytes
from report import write_results
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "examples/models/penstock-tiny"
CLIENTS = 12
SAMPLE_S = 1.0
KILLS = (0.1, 0.2)
"""Shares of the time."""
MOST_RISE = 0.03
"""Of a process's memory over the time measured; a run of half an hour that leaks 3 % would leak its size in a day."""
KINDS = ("stream", "whole", "choices", "logprobs", "long", "shared", "gone", "bad")
LOST = "lost with the server"
PREFIX = "Return the number of items of a container. " * 12


class Sample(NamedTuple):
    """Of the server's two processes: seconds since the start, bytes in memory, open file descriptors."""

    at: float
    frontend_rss: int
    core_rss: int
    frontend_fds: int
    core_fds: int


class Server:
    """`penstock serve` as a process that is started as often as it takes."""

    def __init__(self, folder: Path) -> None:
        port, self._events, self._replay = free_ports(3)
        self._port, self._folder = port, folder
        self.url = f"http://127.0.0.1:{port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    async def start(self, client: aiohttp.ClientSession) -> None:
        """Returns when it takes requests."""
        ports = ["--port", self._port, "--events-port", self._events, "--replay-port", self._replay]
        # A small cache: memory that is written for the first time is no leak, and all of this one is written soon.
        flags = [*ports, "--served-model-name", "soak", "--kv-cache-memory-bytes", 2**24, "--max-num-seqs", 16]
        command = [sys.executable, "-m", "penstock.cli", "serve", MODEL, *flags]
        with (self._folder / f"serve-{self.starts}.log").open("wb") as log:
            environment = {**os.environ, "TMPDIR": str(self._folder / "tmp")}
            self.process = _spawn([str(word) for word in command], environment, log)
        self.starts += 1
        async with asyncio.timeout(120):
            while True:
                with suppress(aiohttp.ClientError):
                    async with client.get(f"{self.url}/ready") as response:
                        if response.status == 200:
                            return
                if self.process.poll() is not None:
                    raise RuntimeError(f"the server ended with {self.process.returncode}; see {self._folder}")
                await asyncio.sleep(0.2)

    @property
    def core(self) -> int:
        """Process id of the core."""
        assert self.process is not None
        return children(self.process.pid)[0]

    async def ended(self, seconds: float) -> int:
        """Its exit status; `TimeoutError` where it does not end by itself."""
        assert self.process is not None
        async with asyncio.timeout(seconds):
            while self.process.poll() is None:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.05)
        return self.process.returncode

    def sample(self, at: float) -> Sample:
        """Of now."""
        assert self.process is not None
        pids = self.process.pid, self.core
        return Sample(at, *(memory_bytes(pid) for pid in pids), *(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids))


class Traffic:
    """Clients that send one request after the other while `going`."""

    def __init__(self, server: Server, client: aiohttp.ClientSession) -> None:
        self._server, self._client = server, client
        self.going = asyncio.Event()
        self.outcomes: Counter[tuple[str, str]] = Counter()
        """Requests by kind and what became of them."""
        self.down = False
        """Whether the server has been killed: requests may fail then."""

    async def run(self, number: int) -> None:
        """One client, without end."""
        rng = random.Random(number)
        while True:
            await self.going.wait()
            kind = rng.choice(KINDS)
            try:
                outcome = await self._one(kind, rng)
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                outcome = LOST if self.down else f"{type(error).__name__}"
            if outcome == LOST:
                await asyncio.sleep(0.2)
            self.outcomes[kind, outcome] += 1

    async def _one(self, kind: str, rng: random.Random) -> str:
        body = {"model": "soak", "max_tokens": rng.randint(4, 48), "seed": rng.getrandbits(30), "temperature": 0.9}
        body["prompt"] = "".join(rng.choices("abcdefghijklmnop ", k=rng.randint(8, 200)))
        match kind:
            case "stream" | "gone":
                body["stream"] = True
            case "choices":
                body["n"] = 3
            case "logprobs":
                body |= {"logprobs": 5, "prompt_logprobs": 2}
            case "long":
                body["prompt"] *= 4
            case "shared":
                body["prompt"] = PREFIX + body["prompt"]
            case "bad":
                body |= rng.choice([{"temperature": 9}, {"n": 0}, {"nonsense": 1}, {"max_tokens": 10**6}])
        headers = {"x-penstock-timeline": "true"} if rng.random() < 0.2 else {}
        async with self._client.post(f"{self._server.url}/v1/completions", json=body, headers=headers) as response:
            if kind == "gone" and response.status == 200:
                await response.content.readany()
                response.close()
                return "gone"
            answer = await response.read()
        if kind == "bad" and response.status == 400:
            return "refused"
        whole = b"[DONE]" in answer if body.get("stream") else b'"usage"' in answer
        if response.status == 200 and whole:
            return "answered"
        return LOST if self.down else f"status {response.status}, whole: {whole}"


def _spawn(command: list[str], environment: dict[str, str], log: BinaryIO) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


async def soak(seconds: float, folder: Path, progress: Progress) -> dict[str, Any]:
    """Runs everything; the measurements and what is wrong with them."""
    (folder / "tmp").mkdir()
    server = Server(folder)
    bar = progress.add_task("soak", total=seconds)
    samples: list[Sample] = []
    began = time.monotonic()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as client:
        traffic = Traffic(server, client)
        await server.start(client)
        await asyncio.sleep(1)
        before = server.sample(0.0)
        clients = [asyncio.create_task(traffic.run(number)) for number in range(CLIENTS)]
        traffic.going.set()
        kills = [share * seconds for share in KILLS]
        statuses: list[int] = []
        while (at := time.monotonic() - began) < seconds:
            if kills and at > kills[0]:
                kills.pop(0)
                statuses.append(await _kill_core(server, traffic, client))
                samples.clear()  # another process
            samples.append(server.sample(at))
            progress.update(bar, completed=at, description=_state(samples[-1], traffic))
            await asyncio.sleep(SAMPLE_S)
        traffic.going.clear()
        rest = await _at_rest(server, client)
        for task in clients:
            task.cancel()
    await asyncio.sleep(1)  # the clients' connections are closed
    after = server.sample(seconds)
    assert server.process is not None
    server.process.send_signal(signal.SIGTERM)
    statuses.append(await server.ended(30))
    measurements = {
        "requests": {f"{kind}: {outcome}": count for (kind, outcome), count in sorted(traffic.outcomes.items())},
        "starts": server.starts,
        "exit_statuses": statuses,
        "memory": [_trend(samples, process) for process in ("frontend", "core")],
        "fds": {"before": before[3:], "after": after[3:]},
        "at_rest": rest,
        "core_mib": [one.core_rss >> 20 for one in samples[:: max(1, len(samples) // 30)]],
        "left_in_tmp": sorted(path.name for path in (folder / "tmp").iterdir()),
    }
    return measurements | {"faults": faults(measurements)}


def faults(found: dict[str, Any]) -> list[str]:
    """What a replica that leaks nothing would not show."""
    bad = [f"{count} × {what}" for what, count in found["requests"].items() if not what.endswith(_FINE)]
    if found["exit_statuses"] != [1] * len(KILLS) + [0]:
        bad.append(f"the server ended with {found['exit_statuses']}")
    for trend in found["memory"]:
        if trend["rise"] > MOST_RISE:
            bad.append(f"the {trend['process']}'s memory rose by {trend['rise']:.1%}")
    for process, before, after in zip(("frontend", "core"), *found["fds"].values(), strict=True):
        if after > before + 2:  # one connection for the probe, one that is being closed
            bad.append(f"the {process} has {after} open files, {before} before")
    bad += [f"{name} is {value} at rest" for name, value in found["at_rest"].items() if value]
    bad += [f"left behind: {name}" for name in found["left_in_tmp"]]
    return bad


_FINE = (": answered", ": gone", ": refused", ": lost with the server")


async def _kill_core(server: Server, traffic: Traffic, client: aiohttp.ClientSession) -> int:
    """The server's exit status; it runs again afterwards."""
    traffic.down = True
    os.kill(server.core, signal.SIGKILL)
    status = await server.ended(30)
    await server.start(client)
    await asyncio.sleep(1)  # requests that were cut off have been counted
    traffic.down = False
    return status


async def _at_rest(server: Server, client: aiohttp.ClientSession) -> dict[str, float]:
    """What runs, waits and is in use once everybody is answered."""
    await asyncio.sleep(1)
    report: dict[str, Any] = {}
    for _ in range(60):
        async with client.get(f"{server.url}/load") as response:
            report = await response.json()
        if not report["num_requests_running"] and not report["num_requests_waiting"]:
            break
        await asyncio.sleep(0.5)
    await asyncio.sleep(1.5)
    waiting = sum(report["num_requests_waiting"].values())
    usage = report["kv_cache_usage_perc"]
    return {"running": report["num_requests_running"], "waiting": waiting, "kv_cache_usage_perc": usage}


def _trend(samples: list[Sample], process: str) -> dict[str, Any]:
    """Memory over the last life of the server, without its first quarter: a straight line through it."""
    at, rss = np.array([(one.at, getattr(one, f"{process}_rss")) for one in samples[len(samples) // 4 :]]).T
    slope = float(np.polyfit(at, rss, 1)[0])
    middle, seconds = float(np.median(rss)), float(at[-1] - at[0])
    return {
        "process": process,
        "rss_mib": round(middle / 2**20, 1),
        "mib_per_hour": round(slope * 3600 / 2**20, 2),
        "seconds": round(seconds, 1),
        "rise": round(slope * seconds / middle, 5),
    }


def _state(sample: Sample, traffic: Traffic) -> str:
    requests = sum(traffic.outcomes.values())
    return f"{requests} requests, frontend {sample.frontend_rss >> 20} MiB, core {sample.core_rss >> 20} MiB"


def show(found: dict[str, Any], console: Console) -> None:
    """Tables and the verdict."""
    requests = Table("requests", "count", title="What became of them")
    for what, count in found["requests"].items():
        requests.add_row(what, str(count))
    memory = Table("process", "MiB", "MiB an hour", "rise", "over s", "open files before", "after", title="The last life")
    for trend, before, after in zip(found["memory"], *found["fds"].values(), strict=True):
        numbers = trend["rss_mib"], trend["mib_per_hour"], f"{trend['rise']:.2%}", trend["seconds"], before, after
        memory.add_row(trend["process"], *map(str, numbers))
    console.print(requests, memory)
    console.print(f"starts {found['starts']}, exit statuses {found['exit_statuses']}, at rest {found['at_rest']}")
    console.print("\n".join(["[red]FAULTS[/red]", *found["faults"]]) if found["faults"] else "[green]nothing leaked[/green]")


def main() -> int:
    """Runs and writes the benchmark; 1 where something is wrong."""
    parser = argparse.ArgumentParser(description="Does a replica leak under mixed traffic, aborts and kills?")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default: 30)")
    seconds = 60 * parser.parse_args().minutes
    console = Console()
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, Progress(*columns, console=console) as progress:
        found = asyncio.run(soak(seconds, Path(folder), progress))
    show(found, console)
    path = write_results("soak", {"minutes": seconds / 60, **found})
    console.print(f"written to {path}")
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
