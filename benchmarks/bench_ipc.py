"""What a message between core and frontend costs: the engine's ZMQ sockets beside a bare stream, in CPU time of both processes.

    make bench-ipc

A core sends the frame of a step every few milliseconds, as an engine does that waits for its device. A frontend on uvloop decodes
it, and sends a new request now and then. Both arms encode and decode alike. The threads of libzmq, one in each process, count.
The arms take turns, and the median of their rounds counts. In the same run the demo model is served over HTTP, so that the
difference can be set against what a token costs its frontend, and its frontend and core together.
"""

import argparse
import asyncio
import multiprocessing
import select
import socket
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import uvloop
import zmq
from bench_egress import LONG, answers, cpu_seconds, serving
from procfs import children
from report import write_results
from rich.console import Console
from rich.table import Table

from penstock.engine import messages
from penstock.engine.core.ipc.framing import LENGTH_BYTES, framed
from penstock.engine.core.ipc.inbox import Inbox
from penstock.engine.core.ipc.ports import SinglePort
from penstock.engine.core.ipc.sockets import Context
from penstock.engine.messages import AddRequest, CoreInput, CoreOutput, StepOutputs
from penstock.engine.sampling import SamplingParams

BATCHES = (1, 16, 64, 256)
STEPS, WARM_UP, PERIOD_S = 1500, 100, 0.002
ROUNDS = 5
STEPS_A_REQUEST, PROMPT = 20, 500
"""Steps between two requests, and tokens of each one's prompt."""
Row = dict[str, Any]


class CoreEnd(Protocol):
    """The core's side of an arm: what both it and `SinglePort` do."""

    def poll(self, patience_ms: int) -> bool:
        """Whether something has come, after as long a wait at most."""
        ...

    def receive(self) -> Iterator[CoreInput]:
        """What has come."""
        ...

    def send(self, message: CoreOutput) -> None:
        """Does not wait."""
        ...


class StreamCore:
    """A stream socket, and four bytes of length before each message. It does no more than this benchmark needs: it would drop
    what the other side does not read, and believes that a request comes in one piece."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._poller = select.poll()
        self._poller.register(connection, select.POLLIN)

    def poll(self, patience_ms: int) -> bool:
        """Whether something has come, after as long a wait at most."""
        return bool(self._poller.poll(patience_ms))

    def receive(self) -> Iterator[CoreInput]:
        """What has come."""
        return map(messages.decode_input, taken(bytearray(self._connection.recv(2**18))))

    def send(self, message: CoreOutput) -> None:
        """Does not wait."""
        data = framed(messages.encode(message))
        assert self._connection.send(data) == len(data), "the frontend reads"


class StreamInbox(asyncio.Protocol):
    """The frontend's side of a `StreamCore`."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._messages: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the connection."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Take in bytes."""
        self._rest += data
        self._messages += taken(self._rest)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def send(self, payload: bytes) -> None:
        """To the core."""
        self.transport.write(framed(payload))

    async def next(self) -> bytes:
        """The next message."""
        while not self._messages:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._messages.popleft()


def taken(data: bytearray) -> list[bytes]:
    """The whole messages at the beginning of a stream, which are taken away."""
    found: list[bytes] = []
    while len(data) >= LENGTH_BYTES and len(data) >= (end := LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")):
        found.append(bytes(data[LENGTH_BYTES:end]))
        del data[:end]
    return found


def frame(step: int, batch: int) -> StepOutputs:
    """A token for each of `batch` requests."""
    indexes, offsets = np.arange(batch, dtype="<i8"), np.arange(batch + 1, dtype="<i4")
    tokens = np.full(batch, step % 100, "<i4")
    return StepOutputs(0, step, time.time(), indexes.tobytes(), offsets.tobytes(), tokens.tobytes(), [], [])


def turn_core(end: CoreEnd, batch: int, told: Connection) -> None:
    """Sends `WARM_UP` + `STEPS` frames, one a period, and tells the CPU seconds of the latter and the requests received."""
    used, requests, due = 0.0, 0, time.monotonic()
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            used = time.process_time()
        due += PERIOD_S
        while (left := due - time.monotonic()) > 0:
            if end.poll(round(1000 * left + 0.5)):
                requests += len(list(end.receive()))
        end.send(frame(step, batch))
    told.send((time.process_time() - used, requests))
    told.recv()


async def turn_frontend(inbox: Inbox | StreamInbox) -> float:
    """Takes the frames of `turn_core`; CPU seconds of all but the first."""
    used, request = 0.0, AddRequest(1, "r", list(range(PROMPT)), SamplingParams(max_tokens=9), 0.0)
    for step in range(WARM_UP + STEPS):
        payload = await inbox.next()
        assert payload is not None, "the core is there"
        outputs = messages.decode_output(payload)
        assert isinstance(outputs, StepOutputs) and outputs.step_id == step, "frames come whole and in order"
        if step == WARM_UP:
            used = time.process_time()
        if step % STEPS_A_REQUEST == 0:
            inbox.send(messages.encode(request))
    return time.process_time() - used


def stream_core(theirs: socket.socket, batch: int, told: Connection) -> None:
    """The process of the core in one arm."""
    turn_core(StreamCore(theirs), batch, told)


def zmq_core(address: str, batch: int, told: Connection) -> None:
    """The process of the core in the other."""
    turn_core(SinglePort(Context(), address), batch, told)


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


async def stream_round(batch: int) -> tuple[float, float]:
    """CPU seconds of frontend and core with a bare stream."""
    ours, theirs = socket.socketpair()
    inbox = StreamInbox()
    core = started(stream_core, theirs, batch)
    await asyncio.get_running_loop().create_unix_connection(lambda: inbox, sock=ours)
    seconds = await turn_frontend(inbox)
    inbox.transport.close()
    theirs.close()
    return seconds, finished(core)


async def zmq_round(batch: int) -> tuple[float, float]:
    """The same with the engine's own sockets."""
    with tempfile.TemporaryDirectory() as folder:
        inbox, address = Inbox(), str(Path(folder) / "core")
        inbox.bind(address)
        core = started(zmq_core, address, batch)
        seconds = await turn_frontend(inbox)
        inbox.close()
        return seconds, finished(core)


def compare(batch: int, rounds: int) -> Row:
    """Microseconds of CPU a step in both arms, which take turns."""
    arms = {"stream": stream_round, "pyzmq": zmq_round}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            found[name].append(uvloop.run(arm(batch)))
    row: Row = {"batch": batch}
    for name, seconds in found.items():
        frontend, core = (statistics.median(column) / STEPS * 1e6 for column in zip(*seconds, strict=True))
        row |= {f"{name}_frontend_us": round(frontend, 1), f"{name}_core_us": round(core, 1)}
        row[f"{name}_us_per_step"] = round(statistics.median(map(sum, seconds)) / STEPS * 1e6, 1)
    row["gain_us_per_step"] = round(row["pyzmq_us_per_step"] - row["stream_us_per_step"], 1)
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
    table = Table("batch", "stream µs/step", "pyzmq µs/step", "gain µs/token", "of a frontend's token", "of a token in all")
    for row in rows:
        row["token_frontend_us"], row["token_us"] = costs[row["batch"]]
        row["gain_of_frontend"] = round(row["gain_us_per_token"] / row["token_frontend_us"], 3)
        row["gain_of_all"] = round(row["gain_us_per_token"] / row["token_us"], 3)
        shares = [f"{100 * row[key]:.1f} %" for key in ("gain_of_frontend", "gain_of_all")]
        names = ("batch", "stream_us_per_step", "pyzmq_us_per_step", "gain_us_per_token")
        table.add_row(*(f"{row[name]:g}" for name in names), *shares)
    console.print(table)
    figures = {"pyzmq": zmq.__version__, "libzmq": zmq.zmq_version(), "period_ms": 1000 * PERIOD_S, "steps": STEPS, "rows": rows}
    console.print(f"written to {write_results('ipc', figures)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
