"""A closed loop of streams against each server in turn, by one load generator, ours; and the CPU that each server took."""

import asyncio
import operator
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from procfs import children, cpu_times

from peers.loop import OUTPUT, PROMPT, VOCAB
from peers.servers import SERVERS, Launch
from penstock.client.bench.arrivals import drive
from penstock.client.bench.datasets import Request
from penstock.client.bench.records import Record
from penstock.client.bench.report import Cost, summarize
from penstock.client.bench.sender import Sender
from penstock.client.server import Server, ServerError
from penstock.kernels.cpu.isa import Isa

BODY = {"temperature": 0, "ignore_eos": True}
READY_S = 420.0
WARM_UP = 8
"""Streams of the second loop before any is measured; some servers compile for batches."""
Row = dict[str, Any]
Say = Callable[[str], None]


class Absent(Exception):
    """A server cannot be had; why."""


class Running:
    """A server that runs: its process, and where it logs."""

    def __init__(self, launch: Launch, log: Path) -> None:
        self.url = f"http://127.0.0.1:{launch.port}"
        self._launch, self._log = launch, log
        environment = {**os.environ, **launch.environment, "OMP_NUM_THREADS": "1"}
        command = [str(word) for word in launch.command]
        with log.open("w") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)

    async def wait(self, server: Server) -> None:
        """Returns when it takes requests. Raises `Absent` when it ends, or is not ready in time."""
        deadline = time.perf_counter() + READY_S
        while True:
            with suppress(ServerError):  # not listening, or not ready yet
                await server.get(self._launch.ready)
                return
            if self._process.poll() is not None:
                raise Absent(f"ended at its start: {self._log.read_text(errors='replace').strip()[-300:]}")
            if time.perf_counter() > deadline:
                raise Absent(f"not ready after {READY_S:.0f} s")
            await asyncio.sleep(0.2)

    def cpu_seconds(self) -> float:
        """User and system time of all its processes so far."""
        return cpu_seconds(self._process.pid)

    def stop(self) -> None:
        """Ends it and what it has started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(15)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, of its children that have ended, and of those that run."""
    try:
        own, below = sum(cpu_times(pid)), children(pid)
    except (FileNotFoundError, ProcessLookupError):  # ended meanwhile: its parent counts it
        return 0.0
    return own + sum(map(cpu_seconds, below))


@contextmanager
def running(launch: Launch, log: Path) -> Iterator[Running]:
    """A server that is stopped at the end."""
    one = Running(launch, log)
    try:
        yield one
    finally:
        one.stop()


async def closed_loop(sender: Sender, server: Running, streams: int, seconds: float) -> Row:
    """Keeps `streams` requests running for some seconds and for what has begun by then."""
    rng = np.random.default_rng(streams)
    records: list[Record] = []

    async def one(due: float, request: Request) -> None:
        records.append(await sender.send(due, request))

    def requests() -> Iterator[tuple[float, Request]]:
        while time.perf_counter() < end:
            yield 0.0, Request(rng.integers(6, VOCAB, PROMPT).tolist(), OUTPUT)

    start, cpu, own = time.perf_counter(), server.cpu_seconds(), time.process_time()
    end = start + seconds
    await drive(requests(), one, max_concurrency=streams)
    wall, cpu, own = time.perf_counter() - start, server.cpu_seconds() - cpu, time.process_time() - own
    report = summarize(records, wall, [50], {}, Cost(devices=1))
    assert not report.errors, report.errors
    assert all((record.prompt_tokens, record.output_tokens) == (PROMPT, OUTPUT) for record in records), "lengths differ"
    return {
        "streams": streams,
        "tok_per_s": round(report.output_throughput, 1),
        "tok_per_cpu_s": round(report.output_tokens / cpu, 1),
        "ttft_p50_ms": round(report.latencies["ttft"].median, 1),
        "itl_p50_ms": round(report.latencies["itl"].median, 2),
        "client_cpu_share": round(own / wall, 2),
    }


async def first_texts(server: Server) -> list[str]:
    """What a server answers to 32 prompts with its first token: whether it has the same weights as the others."""
    rng = np.random.default_rng(0)
    texts: list[str] = []
    for _ in range(32):
        body = {"model": "bench", "prompt": rng.integers(6, VOCAB, 16).tolist(), "max_tokens": 1, **BODY}
        async with server.session.post(server.url("/v1/completions"), json=body) as response:
            texts.append((await response.json())["choices"][0]["text"])
    return texts


class Bench:
    """The servers that could be started.

    Args:
        folder: For logs.
        say: Told what goes on.
    """

    def __init__(self, folder: Path, say: Say) -> None:
        self._folder, self._say = folder, say
        self._found: dict[str, tuple[Running, Sender]] = {}
        self._texts: list[str] = []
        self.absent: dict[str, str] = {}

    async def start(self, stack: AsyncExitStack, name: str, launch: Launch | str) -> None:
        """Starts one, holds it against the first of all, and warms it up."""
        if isinstance(launch, str):
            self.absent[name] = launch
            return
        one = stack.enter_context(running(launch, self._folder / f"{name}.log"))
        server = await stack.enter_async_context(Server(one.url))
        try:
            await one.wait(server)
        except Absent as error:
            self.absent[name] = str(error)
            return
        sender = Sender(server, "/v1/completions", "bench", BODY)
        texts = await first_texts(server)
        self._texts = self._texts if self._found else texts
        same = sum(map(operator.eq, texts, self._texts))
        assert same >= len(texts) * 3 / 4, f"{name} begins only {same} of {len(texts)} answers as the others: another model?"
        for streams in (1, WARM_UP):
            await closed_loop(sender, one, streams, 0.5)
        self._found[name] = one, sender

    async def measure(self, streams: int, seconds: float) -> list[Row]:
        """A row for each server, one after the other."""
        rows: list[Row] = []
        for name, (one, sender) in self._found.items():
            self._say(f"{name}, {streams} streams")
            rows.append({"server": name, **await closed_loop(sender, one, streams, seconds)})
        return rows


async def bench_servers(
    model: Path, folder: Path, streams: Sequence[int], seconds: float, isa: Isa | None, say: Say
) -> tuple[list[Row], dict[str, str]]:
    """A row for each server and number of streams, the servers in turn at each number; and the absent ones with the reason.

    All of them run from the beginning to the end, idle while another is measured: what disturbs the machine disturbs all alike.
    """
    bench = Bench(folder, say)
    async with AsyncExitStack() as stack:
        for name, make in SERVERS.items():
            say(f"starting {name}")
            await bench.start(stack, name, make(model, isa))
        return [row for count in streams for row in await bench.measure(count, seconds)], bench.absent
