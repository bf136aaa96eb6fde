"""Runs plans in processes of their own, one a rank: starts them, sends each plan once, compares what they give, and ends them all
where one of them is gone, hangs or disagrees."""

import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from penstock.engine.config import ConfigError, EngineConfig
from penstock.engine.core.executor import Runner, StepFailed
from penstock.engine.core.plan import SampledTokens, SampleInputs, StepPlan, StepResult
from penstock.engine.environment import computing
from penstock.engine.parallel import words
from penstock.engine.parallel.broadcast import Ring, Writer
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.parallel.fingerprint import Fingerprint, check_same
from penstock.engine.parallel.frames import FrameReader, receive_frame, send_frame
from penstock.engine.parallel.links import Link, LinkEnd
from penstock.engine.parallel.shared_memory import RankProgress, SharedMemory
from penstock.engine.parallel.words import Answer, Broken, Call, Hello, Refused, Retired, Sample, StepLost, Submit, WorkerStart

_LISTEN_MS = 100
"""Between two looks at how far the ranks have come."""
_STACK_S = 0.5
"""Seconds for a rank that hangs to write its stack."""
_LONE_LOSS_S = 5.0
"""Without progress, after which a step that one rank has lost is not lost on the others."""
_CLOSE_S = 5.0

log = logging.getLogger(__name__)


class _Rank:
    """One process, as the core sees it.

    Args:
        number: The rank's.
        config: Of the engine.
        ring: Where it reads plans.
        memory: Shared with the ranks of its pipeline stage.
        before: From the stage before; None: there is none.
        after: To the next stage; None: there is none.
    """

    def __init__(
        self, number: int, config: EngineConfig, ring: Ring, memory: SharedMemory, before: LinkEnd | None, after: LinkEnd | None
    ) -> None:
        self.number, self.stage = number, number // memory.world
        self.name = f"rank {number}" if ring.readers > 1 else "the worker"
        self.before, self.after = before, after
        self.stream, theirs = socket.socketpair()
        self.beside, theirs_beside = socket.socketpair()
        fds = (theirs.fileno(), theirs_beside.fileno(), ring.fd, memory.fd)
        command = [sys.executable, "-m", "penstock.engine.parallel.worker", *map(str, (*fds, ring.readers, memory.world))]
        fds += (before or ()) + (after or ())
        with theirs, theirs_beside:
            self.process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, env=computing(config))
        self.frames = FrameReader(self.stream)
        self.fingerprint: Fingerprint = {}
        """What it has said about itself; empty until it has."""
        self.steps: deque[Retired | StepLost] = deque()
        self.answers: deque[Answer | Refused] = deque()

    def obituary(self) -> str:
        """How it ended; only where it has, or is about to."""
        try:
            status = self.process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            return f"{self.name} (process {self.process.pid}) has closed its socket"
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        return f"{self.name} (process {self.process.pid}) {how}"

    def close(self) -> None:
        self.stream.close()
        self.beside.close()


class ProcessExecutor:
    """See Executor.

    Args:
        config: Its `parallel` says how many ranks.
        runner: `module:Class` of the model runner, which with several ranks takes a `Group` as `group`.

    Raises:
        ConfigError: The ranks are not alike, or there is no memory for them to share.
        GroupFailed: A rank could not start.
    """

    def __init__(self, config: EngineConfig, runner: str) -> None:
        world, self._each = config.parallel.world, config.parallel.tensor_parallel_size
        if world > (cores := len(os.sched_getaffinity(0))):
            log.warning("%d ranks share %d cores: each waits for the others' turns", world, cores)
        self._timeout, self._ranks = config.parallel.timeout, list[_Rank]()
        self._ring, stages = Ring.create(world), config.parallel.pipeline_parallel_size
        self._memories = [SharedMemory.create(self._each) for _ in range(stages)]
        self._links, self._sampled = [Link() for _ in range(world - self._each)], list[SampledTokens]()
        """From each rank to the one in its place in the next stage; and what earlier stages have yet to be told."""
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-ranks-"))
        self._poll = select.poll()
        try:
            for number in range(world):
                rank = self._start(number, config)
                meeting = f"file://{self._folder}/meeting-{rank.stage}"
                start = WorkerStart(
                    config=config,
                    runner=runner,
                    rank=number,
                    world=world,
                    meeting=meeting,
                    before=rank.before,
                    after=rank.after,
                )
                send_frame(rank.beside, words.encode(start))
        except BaseException:
            self.close()
            raise
        self._writer = Writer(self._ring, [rank.stream for rank in self._ranks], lambda: self._listen(0, hurried=True))
        self._moved, self._seen = time.monotonic(), self.progress()
        while not all(rank.fingerprint for rank in self._ranks):
            self._listen(_LISTEN_MS, hurried=False)
        try:
            check_same([rank.fingerprint for rank in self._ranks])
        except ConfigError:
            self.close()
            raise

    def _start(self, number: int, config: EngineConfig) -> _Rank:
        """Start the process of a rank."""
        each, links = self._each, self._links
        before = links[number - each].receiver if number >= each else None
        after = links[number].sender if number < len(links) else None
        rank = _Rank(number, config, self._ring, self._memories[number // each], before, after)
        self._ranks.append(rank)
        self._poll.register(rank.stream, select.POLLIN)
        return rank

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [rank.process.pid for rank in self._ranks]

    def progress(self) -> list[RankProgress]:
        """Progress by rank: the number of collectives, and their time."""
        return [mark for memory in self._memories for mark in memory.progress()]

    def submit(self, plan: StepPlan) -> None:
        """Sends the plan to all ranks, at once: the core fills masks while they compute."""
        sampled, self._sampled = self._sampled, []
        self._send(Submit(plan, sampled))

    def sample(self, inputs: SampleInputs) -> None:
        """Sends it to all ranks."""
        self._send(Sample(inputs))

    def collect(self) -> StepResult:
        """Waits for the oldest step of every rank.

        Raises:
            StepFailed: It has failed on all ranks.
            GroupFailed: A rank is gone, hangs, or gives something else than the others; all processes have been ended.
        """
        self._moved = time.monotonic()
        while waited := [rank for rank in self._ranks if not rank.steps]:
            self._listen(_LISTEN_MS, hurried=len(self._ranks) > 1, waited=waited)
            for rank in self._ranks:
                # The others wait for what it will never send.
                if rank.steps and isinstance(step := rank.steps[0], StepLost) and time.monotonic() - self._moved > _LONE_LOSS_S:
                    self._end(rank, f"{rank.name} alone has lost a step: {step.message}")
        steps = [rank.steps.popleft() for rank in self._ranks]
        lost = [step for step in steps[-self._each :] if isinstance(step, StepLost)]
        if len(lost) == self._each:
            raise StepFailed(lost[0].message)
        for rank, step in zip(self._ranks, steps, strict=True):
            if isinstance(step, StepLost):
                self._end(rank, f"{rank.name} alone has lost a step: {step.message}")
        last, first = self._ranks[-self._each :], steps[-self._each]
        assert isinstance(first, Retired) and first.result is not None
        result = first.result
        for rank, step in zip(last, steps[-self._each :], strict=True):
            if isinstance(step, Retired) and step.digest != first.digest:
                self._end(rank, f"{rank.name} and {last[0].name} disagree about the tokens of step {result.step_id}")
        if self._links:
            self._sampled.append(SampledTokens(result.step_id, result.token_ids, result.counts, result.drafts))
        return result

    def call(self, method: str, *args: Any) -> list[Any]:
        """See Executor. Where some ranks refuse and others do not, the group is ended."""
        self._send(Call(method, list(args)))
        while not all(rank.answers for rank in self._ranks):
            self._listen(_LISTEN_MS, hurried=False)
        return self._answers(method, [rank.answers.popleft() for rank in self._ranks])

    def call_beside(self, method: str, *args: Any) -> list[Any]:
        """The same at once, beside steps that run, of a method for which that is safe."""
        message, replies = words.encode(Call(method, list(args))), list[Answer | Refused]()
        try:
            for rank in self._ranks:
                send_frame(rank.beside, message)
            for rank in self._ranks:
                if (frame := receive_frame(rank.beside)) is None:
                    self._end(rank, rank.obituary())
                reply = words.decode_reply(frame)
                assert isinstance(reply, Answer | Refused)
                replies.append(reply)
        except OSError:
            self._bury()
        return self._answers(method, replies)

    def check(self) -> None:
        """Raises `GroupFailed` where a rank has gone, while nothing is expected of it."""
        self._listen(0, hurried=False)

    def close(self) -> None:
        """Ends the processes; safe to call twice."""
        for rank in self._ranks:
            rank.close()
        self._reap(time.monotonic() + _CLOSE_S)
        self._release()

    # --- how it is done ---

    def _send(self, order: words.Order) -> None:
        try:
            self._writer.send(words.encode(order))
        except OSError:
            self._bury()

    def _listen(self, patience_ms: int, *, hurried: bool, waited: list[_Rank] | None = None) -> None:
        """Takes in what ranks say; raises `GroupFailed` where one is gone, or is `hurried` and comes no further."""
        heard = self._poll.poll(patience_ms)
        for fd, _ in heard:
            rank = next(rank for rank in self._ranks if rank.stream.fileno() == fd)
            for frame in rank.frames.read():
                match words.decode_reply(frame):
                    case Hello(fingerprint):
                        rank.fingerprint = fingerprint
                    case Retired() | StepLost() as step:
                        rank.steps.append(step)
                    case Answer() | Refused() as told:
                        rank.answers.append(told)
                    case Broken(message):
                        self._end(rank, f"{rank.name} cannot go on: {message}")
            if rank.frames.ended:
                self._end(rank, rank.obituary())
        if heard or not hurried:
            return
        if (seen := self.progress()) != self._seen:
            self._seen, self._moved = seen, time.monotonic()
        elif time.monotonic() - self._moved > self._timeout:
            # A stage waits for earlier stages alone.
            last = min(waited or self._ranks, key=lambda rank: (rank.stage, seen[rank.number]))
            self._show_stack(last)
            self._end(last, f"{last.name} (process {last.process.pid}) hangs: nothing has moved for {self._timeout:g} seconds")

    def _answers(self, method: str, replies: list[Answer | Refused]) -> list[Any]:
        refusals = [reply for reply in replies if isinstance(reply, Refused)]
        if len(refusals) == len(replies):
            error = ConfigError if refusals[0].kind == "ConfigError" else OSError
            raise error(refusals[0].message)
        for rank, reply in zip(self._ranks, replies, strict=True):
            if isinstance(reply, Refused):
                self._end(rank, f"{rank.name} alone has refused {method}: {reply.message}")
        kind = get_type_hints(getattr(Runner, method))["return"]
        return [words.decode_value(reply.value, kind) for reply in replies if isinstance(reply, Answer)]

    def _bury(self) -> NoReturn:
        """A socket is broken: some rank is gone."""
        gone = [rank for rank in self._ranks if rank.process.poll() is not None]
        self._listen(_LISTEN_MS, hurried=False)  # what it said last
        rank = gone[0] if gone else self._ranks[0]
        self._end(rank, rank.obituary())

    def _show_stack(self, rank: _Rank) -> None:
        """Has a rank that hangs write the stacks of its threads to the log."""
        rank.process.send_signal(signal.SIGABRT)
        deadline = time.monotonic() + _STACK_S
        while rank.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)

    def _end(self, cause: _Rank, message: str) -> NoReturn:
        """Ends all processes, and raises with what has happened."""
        for rank, come in zip(self._ranks, self.progress(), strict=True):
            state = "ended" if rank.process.poll() is not None else "alive"
            log.error("%s: process %d, %s, after %d collectives", rank.name, rank.process.pid, state, come.calls)
        self._memories[cause.stage].fail(cause.number % self._each)
        for rank in self._ranks:
            rank.close()
        self._reap(time.monotonic())
        self._release()
        raise GroupFailed(message)

    def _reap(self, deadline: float) -> None:
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()

    def _release(self) -> None:
        self._ring.close()
        for shared in (*self._memories, *self._links):
            shared.close()
        shutil.rmtree(self._folder, ignore_errors=True)
