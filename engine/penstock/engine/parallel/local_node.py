"""The ranks of one node as processes: starts them, hands them what they are to do, and hears what they say."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Final

from penstock.engine.config import EngineConfig
from penstock.engine.connectors.shared_slots import page_memory
from penstock.engine.environment import computing
from penstock.engine.parallel import words
from penstock.engine.parallel.broadcast import Ring, Writer
from penstock.engine.parallel.expert_group import CoreExperts
from penstock.engine.parallel.frames import FrameReader, send_frame
from penstock.engine.parallel.layout import Layout, Wire
from penstock.engine.parallel.links import Link
from penstock.engine.parallel.node_words import Ended, Report, Said, Started
from penstock.engine.parallel.shared_memory import RankProgress, SharedMemory
from penstock.engine.parallel.words import FarLink, WorkerStart

_STACK_S: Final = 0.5
"""Seconds for a rank that hangs to write its stack."""
CLOSE_S: Final = 5.0
"""Seconds for processes to end by themselves."""

log = logging.getLogger(__name__)


def start_worker(fds: tuple[int, int], passed: tuple[int, ...], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a rank's process, with its ends of the two sockets and what else it needs open."""
    command = [sys.executable, "-m", "penstock.engine.parallel.worker", *map(str, fds)]
    return subprocess.Popen(command, pass_fds=fds + passed, stdin=subprocess.DEVNULL, env=environment)


class _Process:
    """One rank's process, and the two sockets to it."""

    def __init__(self, number: int, name: str, fds: tuple[int, ...], environment: Mapping[str, str]) -> None:
        self.number, self.name = number, name
        self.stream, theirs = socket.socketpair()
        self.beside, theirs_beside = socket.socketpair()
        with theirs, theirs_beside:
            self.popen = start_worker((theirs.fileno(), theirs_beside.fileno()), fds, environment)
        self.readers = {stream.fileno(): FrameReader(stream) for stream in (self.stream, self.beside)}

    def obituary(self) -> str:
        """How it ended; only where it has, or is about to."""
        try:
            status = self.popen.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            return "has closed its socket"
        return f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"

    def close(self) -> None:
        self.stream.close()
        self.beside.close()


class LocalNode:
    """The ranks of the node that this process is on.

    Args:
        config: Of the engine.
        runner: `module:Class` of the model runner, which with several ranks takes a `Group` as `group`.
        node: Its number.
        wires: That begin or end here; closed when the processes have them.
        wait: Called again and again while an order waits for room; raises where a rank will never make it.
        experts: The core's place among those whose ranks divide experts; None: each has a part of every expert.

    Raises:
        ConfigError: There is no memory for the ranks to share.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: str,
        node: int,
        wires: Mapping[Wire, socket.socket],
        wait: Callable[[], None],
        experts: CoreExperts | None = None,
    ) -> None:
        self._experts = experts
        self._layout = layout = Layout.of(config.parallel)
        self._ranks, self._node = layout.on_node(node), node
        self._processes, self._links = list[_Process](), dict[int, Link]()
        self._ring = Ring.create(len(self._ranks))
        self._memories = {number: SharedMemory.create(layout.tensor) for number in sorted({*map(layout.stage, self._ranks)})}
        shares = layout.tensor > 1 and config.cache.offload_bytes > 0
        self._page_memory = [page_memory() for _ in self._ranks] if shares else []
        self._meetings = {number: os.memfd_create("penstock-meeting") for number in self._memories}
        for rank in range(layout.world - layout.tensor):
            if rank in self._ranks or rank + layout.tensor in self._ranks:
                self._links[rank] = Link()
        try:
            for number in self._ranks:
                self._start(number, config, runner, wires)
        except BaseException:
            self.close()
            raise
        finally:
            for stream in wires.values():
                stream.close()
        self._by_fd = {fd: process for process in self._processes for fd in process.readers}
        self._writer = Writer(self._ring, [process.stream for process in self._processes], wait)

    def _start(self, number: int, config: EngineConfig, runner: str, wires: Mapping[Wire, socket.socket]) -> None:
        """Start the process of a rank."""
        layout, stage = self._layout, self._layout.stage(number)
        memory, meeting = self._memories[stage], self._meetings[stage]
        each, before, after = layout.tensor, self._links.get(number - layout.tensor), self._links.get(number)
        mine = {wire: stream.fileno() for wire, stream in wires.items() if number in (wire.sender, wire.receiver)}
        same = {wire for wire in mine if layout.stage(wire.sender) == layout.stage(wire.receiver)}
        far = {wire.sender: fd for wire, fd in mine.items() if wire not in same}
        start = WorkerStart(
            config=config,
            runner=runner,
            rank=number,
            world=layout.world,
            readers=len(self._ranks),
            ring=self._ring.fd,
            memory=memory.fd,
            meeting=f"file:///proc/self/fd/{meeting}",
            before=None if before is None else before.receiver,
            after=None if after is None else after.sender,
            outgoing=[(mine[wire], wire.receiver % each) for wire in sorted(same) if wire.sender == number],
            incoming=[mine[wire] for wire in sorted(same) if wire.receiver == number],
            far_before=None if before is None or number - each not in far else FarLink(before.sender, far[number - each]),
            far_after=None if after is None or number not in far else FarLink(after.receiver, far[number]),
            experts=self._experts,
            page_memory=self._page_memory,
        )
        ends = [end for link in (before, after) if link is not None for end in (link.sender, link.receiver)]
        fds = (self._ring.fd, memory.fd, meeting, *self._page_memory, *mine.values(), *(fd for end in ends for fd in end))
        if self._experts is not None:
            fds += self._experts.descriptors
        name = f"rank {number}" if layout.world > 1 else "the worker"
        process = _Process(number, name, tuple(dict.fromkeys(fds)), computing(config))
        self._processes.append(process)
        send_frame(process.beside, words.encode(start))

    @property
    def started(self) -> Started:
        """What there is."""
        return Started([process.popen.pid for process in self._processes])

    def filenos(self) -> list[int]:
        """Where something may be heard."""
        return list(self._by_fd)

    def hear(self, fd: int) -> list[Report]:
        """Take in what a rank says, or that it has ended."""
        process = self._by_fd[fd]
        beside, reader = fd == process.beside.fileno(), process.readers[fd]
        heard: list[Report] = [Said(process.number, frame, beside) for frame in reader.read()]
        if reader.ended and not beside:
            heard.append(Ended(process.number, process.obituary()))
        return heard

    def progress(self) -> list[RankProgress]:
        """How far the ranks have come."""
        layout = self._layout
        marks = {number: memory.progress() for number, memory in self._memories.items()}
        return [marks[layout.stage(rank)][rank % layout.tensor] for rank in self._ranks]

    def send(self, order: bytes) -> None:
        """For all ranks. Raises `OSError` where one is gone."""
        self._writer.send(order)

    def send_beside(self, order: bytes) -> None:
        """The same, of a call that is safe beside a step."""
        for process in self._processes:
            send_frame(process.beside, order)

    def buried(self) -> Ended:
        """A socket is broken: which rank is gone."""
        gone = [process for process in self._processes if process.popen.poll() is not None]
        process = gone[0] if gone else self._processes[0]
        return Ended(process.number, process.obituary())

    def show_stack(self, rank: int) -> None:
        """Have a rank that hangs write the stacks of its threads to the log; it ends with that."""
        process = self._processes[rank - self._ranks.start].popen
        process.send_signal(signal.SIGABRT)
        deadline = time.monotonic() + _STACK_S
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)

    def end(self, cause: int) -> None:
        """End all processes at once, because of one rank somewhere."""
        for process, come in zip(self._processes, self.progress(), strict=True):
            state = "ended" if process.popen.poll() is not None else "alive"
            log.error("%s: process %d, %s, after %d collectives", process.name, process.popen.pid, state, come.calls)
        if (memory := self._memories.get(self._layout.stage(cause))) is not None:
            memory.fail(cause % self._layout.tensor)
        self.close(0.0)

    def close(self, patience: float = CLOSE_S) -> None:
        """End the processes; safe to call twice."""
        for process in self._processes:
            process.close()
        deadline = time.monotonic() + patience
        for process in self._processes:
            try:
                process.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait()
        self._ring.close()
        for shared in (*self._memories.values(), *self._links.values()):
            shared.close()
        for descriptor in (*self._page_memory, *self._meetings.values()):
            os.close(descriptor)
        self._page_memory, self._meetings = list[int](), dict[int, int]()
