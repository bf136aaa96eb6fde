"""What a message between core and frontend costs: our framing on a Unix socket beside pyzmq, in CPU time of both processes.

    make bench-ipc

A core sends the frame of a step every few milliseconds, as an engine does that waits for its device. A frontend on uvloop decodes
it, and sends a new request now and then. Both arms encode and decode alike. The threads of libzmq, one in each process, count.
The arms take turns, and the median of their rounds counts. In the same run the demo model is served over HTTP, so that the
difference can be set against what a token costs its frontend, and its frontend and core together.
"""

import argparse
import asyncio
import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import uvloop
import zmq
import zmq.asyncio
from bench_egress import LONG, answers, cpu_seconds, serving
from procfs import children
from report import write_results
from rich.console import Console
from rich.table import Table

from penstock.engine import messages
from penstock.engine.core.ipc.inbox import Inbox
from penstock.engine.core.ipc.links import Links
from penstock.engine.messages import AddRequest, StepOutputs
from penstock.engine.sampling import SamplingParams

BATCHES = (1, 16, 64, 256)
STEPS, WARM_UP, PERIOD_S = 1500, 100, 0.002
ROUNDS = 5
STEPS_A_REQUEST, PROMPT = 20, 500
"""Steps between two requests, and tokens of each one's prompt."""
Row = dict[str, Any]


class CoreEnd(Protocol):
    """The core's side of an arm."""

    def poll(self, patience_ms: int) -> bool:
        """Whether something has come, after as long a wait at most."""
        ...

    def receive(self) -> Sequence[bytes]:
        """What has come."""
        ...

    def send(self, payload: bytes) -> None:
        """Does not wait."""
        ...


class FramedCore:
    """As the engine has it."""

    def __init__(self, connection: socket.socket) -> None:
        self._links = Links()
        self._link = self._links.add(connection)
        self.poll = self._links.poll

    def receive(self) -> Sequence[bytes]:
        """See CoreEnd."""
        return self._links.receive(self._link)

    def send(self, payload: bytes) -> None:
        """See CoreEnd."""
        self._links.send(self._link, payload)


class ZmqCore:
    """A PAIR socket of pyzmq, the cheapest kind."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.Context[zmq.Socket[bytes]]().socket(zmq.PAIR)
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def poll(self, patience_ms: int) -> bool:
        """See CoreEnd."""
        return bool(self._poller.poll(patience_ms))

    def receive(self) -> Sequence[bytes]:
        """See CoreEnd."""
        found: list[bytes] = []
        while True:
            try:
                found.append(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return found

    def send(self, payload: bytes) -> None:
        """See CoreEnd."""
        self._socket.send(payload, zmq.NOBLOCK)


def frame(step: int, batch: int) -> StepOutputs:
    """A token for each of `batch` requests."""
    indexes, offsets = np.arange(batch, dtype="<i8"), np.arange(batch + 1, dtype="<i4")
    tokens = np.full(batch, step % 100, "<i4")
    return StepOutputs(0, step, time.time(), indexes.tobytes(), offsets.tobytes(), tokens.tobytes(), [], [])


def turn_core(end: CoreEnd, batch: int, told: Connection) -> None:
    """Sends `WARM_UP` + `STEPS` frames, one a period, and tells the CPU seconds of the latter and the requests that came."""
    used, requests, due = 0.0, 0, time.monotonic()
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            used = time.process_time()
        due += PERIOD_S
        while (left := due - time.monotonic()) > 0:
            if end.poll(round(1000 * left + 0.5)):
                requests += len([messages.decode_input(payload) for payload in end.receive()])
        end.send(messages.encode(frame(step, batch)))
    told.send((time.process_time() - used, requests))
    told.recv()


async def turn_frontend(receive: Any, send: Any) -> float:
    """Takes the frames of `turn_core`; CPU seconds of all but the first."""
    used, request = 0.0, AddRequest(1, "r", list(range(PROMPT)), SamplingParams(max_tokens=9), 0.0)
    for step in range(WARM_UP + STEPS):
        outputs = messages.decode_output(await receive())
        assert isinstance(outputs, StepOutputs) and outputs.step_id == step, "frames come whole and in order"
        if step == WARM_UP:
            used = time.process_time()
        if step % STEPS_A_REQUEST == 0:
            sent = send(messages.encode(request))
            if sent is not None:
                await sent
    return time.process_time() - used


def framed_core(theirs: socket.socket, batch: int, told: Connection) -> None:
    """The process of the core in one arm."""
    turn_core(FramedCore(theirs), batch, told)


def zmq_core(address: str, batch: int, told: Connection) -> None:
    """The process of the core in the other."""
    turn_core(ZmqCore(address), batch, told)


def started(target: Any, end: Any, batch: int) -> tuple[multiprocessing.Process, Connection]:
    """A core's process, and where it tells what it used."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(end, batch, theirs), daemon=True)
    process.start()
    return process, ours  # pyright: ignore[reportReturnType] (a process of a context is no subclass by its stub)


def finished(core: tuple[multiprocessing.Process, Connection]) -> float:
    """The core's CPU seconds."""
    process, told = core
    seconds, requests = told.recv()
    assert requests >= (STEPS - STEPS_A_REQUEST) // STEPS_A_REQUEST, "the core has had the requests"
    told.send(None)
    process.join()
    return seconds


async def framed_round(batch: int) -> tuple[float, float]:
    """CPU seconds of frontend and core with the engine's own framing."""
    ours, theirs = socket.socketpair()
    inbox = Inbox()
    core = started(framed_core, theirs, batch)
    await asyncio.get_running_loop().create_unix_connection(lambda: inbox, sock=ours)
    seconds = await turn_frontend(inbox.next, inbox.send)
    inbox.close()
    theirs.close()
    return seconds, finished(core)


async def zmq_round(batch: int) -> tuple[float, float]:
    """The same with pyzmq."""
    with tempfile.TemporaryDirectory() as folder:
        context = zmq.asyncio.Context()
        pair = context.socket(zmq.PAIR)
        address = f"ipc://{Path(folder) / 'pair'}"
        pair.bind(address)
        core = started(zmq_core, address, batch)
        seconds = await turn_frontend(pair.recv, pair.send)
        used = finished(core)
        context.destroy(linger=0)
    return seconds, used


def compare(batch: int, rounds: int) -> Row:
    """Microseconds of CPU a step in both arms, which take turns."""
    arms = {"framing": framed_round, "pyzmq": zmq_round}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            found[name].append(uvloop.run(arm(batch)))
    row: Row = {"batch": batch}
    for name, seconds in found.items():
        frontend, core = (statistics.median(column) / STEPS * 1e6 for column in zip(*seconds, strict=True))
        row |= {f"{name}_frontend_us": round(frontend, 1), f"{name}_core_us": round(core, 1)}
        row[f"{name}_us_per_step"] = round(statistics.median(map(sum, seconds)) / STEPS * 1e6, 1)
    row["gain_us_per_step"] = round(row["pyzmq_us_per_step"] - row["framing_us_per_step"], 1)
    row["gain_us_per_token"] = round(row["gain_us_per_step"] / batch, 2)
    return row


async def token_costs(batches: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Batch → microseconds of CPU that a streamed token of the demo model costs the frontend, and frontend and core together."""
    body = {"stream": True, "ignore_eos": True, "max_tokens": LONG, "stream_options": {"include_usage": True}}
    costs: dict[int, tuple[float, float]] = {}
    async with serving() as (client, pid):
        [core] = children(pid)
        for batch in batches:
            await answers(client, pid, batch, 1, body)
            before = cpu_seconds(core)["all"]
            work = await answers(client, pid, batch, max(1, 16 // batch), body)
            both = work.cpu["all"] + cpu_seconds(core)["all"] - before
            costs[batch] = (round(work.cpu["all"] / work.tokens * 1e6, 1), round(both / work.tokens * 1e6, 1))
    return costs


def main() -> int:
    """Prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of each arm and batch (default {ROUNDS})")
    arguments = parser.parse_args()
    console = Console()
    with console.status("both arms in turn"):
        rows = [compare(batch, arguments.rounds) for batch in BATCHES]
    with console.status("serving the demo model"):
        costs = asyncio.run(token_costs(BATCHES))
    table = Table("batch", "framing µs/step", "pyzmq µs/step", "gain µs/token", "of a frontend's token", "of a token in all")
    for row in rows:
        row["token_frontend_us"], row["token_us"] = costs[row["batch"]]
        row["gain_of_frontend"] = round(row["gain_us_per_token"] / row["token_frontend_us"], 3)
        row["gain_of_all"] = round(row["gain_us_per_token"] / row["token_us"], 3)
        shares = [f"{100 * row[key]:.1f} %" for key in ("gain_of_frontend", "gain_of_all")]
        names = ("batch", "framing_us_per_step", "pyzmq_us_per_step", "gain_us_per_token")
        table.add_row(*(f"{row[name]:g}" for name in names), *shares)
    console.print(table)
    figures = {"pyzmq": zmq.__version__, "libzmq": zmq.zmq_version(), "period_ms": 1000 * PERIOD_S, "steps": STEPS, "rows": rows}
    console.print(f"written to {write_results('ipc', figures)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
