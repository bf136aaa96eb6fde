"""Runs plans in processes of their own, one a rank: sends each plan once, compares what they give, and ends them all where one of
them is gone, hangs or disagrees. The ranks may be on several nodes, each with a process that starts and hears those on it."""

import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, get_type_hints

import msgspec

from penstock.engine.config import ConfigError, EngineConfig
from penstock.engine.core.executor import Runner, StepFailed
from penstock.engine.core.plan import SampledTokens, SampleInputs, StepPlan, StepResult
from penstock.engine.parallel import words
from penstock.engine.parallel.errors import GroupFailed, RankRefused
from penstock.engine.parallel.expert_group import CoreExperts
from penstock.engine.parallel.fingerprint import Fingerprint, check_same, fingerprint
from penstock.engine.parallel.layout import Layout
from penstock.engine.parallel.local_node import LocalNode
from penstock.engine.parallel.node_words import Ended, Report, Said, Started
from penstock.engine.parallel.remote_node import RemoteNode
from penstock.engine.parallel.rendezvous import Master, connect
from penstock.engine.parallel.shared_memory import RankProgress
from penstock.engine.parallel.words import Answer, Broken, Call, Hello, Refused, Retired, Sample, StepLost, Submit

_LISTEN_MS = 100
"""Between two looks at how far the ranks have come."""
_LONE_LOSS_S = 5.0
"""Without progress, after which a step that one rank has lost is not lost on the others."""

log = logging.getLogger(__name__)


class Node(Protocol):
    """The ranks of one node, as `LocalNode` describes it: here, or reached over TCP."""

    def filenos(self) -> list[int]: ...
    def hear(self, fd: int) -> list[Report]: ...
    def progress(self) -> list[RankProgress]: ...
    def send(self, order: bytes) -> None: ...
    def send_beside(self, order: bytes) -> None: ...
    def buried(self) -> Ended: ...
    def show_stack(self, rank: int) -> None: ...
    def end(self, cause: int) -> None: ...
    def close(self) -> None: ...


class _Rank:
    """What the core knows of one rank.

    Args:
        number: The rank's.
        layout: Of the engine.
    """

    def __init__(self, number: int, layout: Layout) -> None:
        self.number, self.stage, self.node = number, layout.stage(number), layout.node(number)
        self.name = f"rank {number}" if layout.world > 1 else "the worker"
        self.pid = 0
        self.fingerprint: Fingerprint = {}
        """What it has said about itself; empty until it has."""
        self.steps: deque[Retired | StepLost] = deque()
        self.answers: deque[Answer | Refused] = deque()
        self.besides: deque[Answer | Refused] = deque()

    @property
    def full_name(self) -> str:
        """With its process."""
        return f"{self.name} (process {self.pid}{f' on node {self.node}' if self.node else ''})"


class ProcessExecutor:
    """See Executor.

    Args:
        config: Its `parallel` says how many ranks, and on how many nodes.
        runner: `module:Class` of the model runner, which with several ranks takes a `Group` as `group`.
        experts: The core's place among those whose ranks divide experts; None: each has a part of every expert.

    Raises:
        ConfigError: The ranks are not alike, or there is no memory for them to share.
        GroupFailed: A rank could not start, or a node has not come.
    """

    def __init__(self, config: EngineConfig, runner: str, experts: CoreExperts | None = None) -> None:
        self._layout = layout = Layout.of(config.parallel)
        if layout.per_node > (cores := len(os.sched_getaffinity(0))):
            log.warning("%d ranks share %d cores: each waits for the others' turns", layout.per_node, cores)
        self._timeout = config.parallel.timeout
        self._ranks, self._sampled = [_Rank(number, layout) for number in range(layout.world)], list[SampledTokens]()
        """What earlier stages have yet to be told of steps."""
        self._last = self._ranks[-layout.tensor :]
        self._nodes, self._by_fd, self._poll = list[Node](), dict[int, Node](), select.poll()
        try:
            self._nodes += start_nodes(config, runner, layout, lambda: self._listen(0, hurried=True), experts)
            for node in self._nodes:
                for fd in node.filenos():
                    self._by_fd[fd] = node
                    self._poll.register(fd, select.POLLIN)
                if isinstance(node, LocalNode):
                    self._note(node.started, 0)
            self._moved, self._seen = time.monotonic(), self.progress()
            while not all(rank.fingerprint for rank in self._ranks):
                self._listen(_LISTEN_MS, hurried=False)
            check_same([rank.fingerprint for rank in self._ranks])
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [rank.pid for rank in self._ranks]

    def progress(self) -> list[RankProgress]:
        """Progress by rank: the number of collectives, and their time."""
        return [mark for node in self._nodes for mark in node.progress()]

    def submit(self, plan: StepPlan, masked: bool) -> None:
        """Sends the plan to all ranks, at once: the core fills masks while they compute."""
        sampled, self._sampled = self._sampled, []
        self._send(Submit(plan, masked, sampled))

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
        lost = [step for step in steps[-self._layout.tensor :] if isinstance(step, StepLost)]
        if len(lost) == self._layout.tensor:
            raise StepFailed(lost[0].message)
        for rank, step in zip(self._ranks, steps, strict=True):
            if isinstance(step, StepLost):
                self._end(rank, f"{rank.name} alone has lost a step: {step.message}")
        first = steps[-self._layout.tensor]
        assert isinstance(first, Retired) and first.result is not None
        result = first.result
        for rank, step in zip(self._last, steps[-self._layout.tensor :], strict=True):
            if isinstance(step, Retired) and step.digest != first.digest:
                self._end(rank, f"{rank.name} and {self._last[0].name} disagree about the tokens of step {result.step_id}")
        if self._layout.stages == 1:
            return result
        self._sampled.append(SampledTokens(result.step_id, result.token_ids, result.counts, result.drafts))
        before = steps[: -self._layout.tensor : self._layout.tensor]
        towers_s = sum(step.encoder_s for step in before if isinstance(step, Retired))
        return msgspec.structs.replace(result, encoder_s=result.encoder_s + towers_s)

    def call(self, method: str, *args: Any) -> list[Any]:
        """See Executor. Where some ranks refuse and others do not, the group is ended."""
        self._send(Call(method, list(args)))
        while not all(rank.answers for rank in self._ranks):
            self._listen(_LISTEN_MS, hurried=False)
        return self._answers(method, [rank.answers.popleft() for rank in self._ranks])

    def call_beside(self, method: str, *args: Any) -> list[Any]:
        """The same at once, beside steps that run, of a method for which that is safe."""
        message = words.encode(Call(method, list(args)))
        for node in self._nodes:
            try:
                node.send_beside(message)
            except OSError:
                self._bury(node)
        while not all(rank.besides for rank in self._ranks):
            self._listen(_LISTEN_MS, hurried=False)
        return self._answers(method, [rank.besides.popleft() for rank in self._ranks])

    def check(self) -> None:
        """Raises `GroupFailed` where a rank has gone, while nothing is expected of it."""
        self._listen(0, hurried=False)

    def close(self) -> None:
        """Ends the processes; safe to call twice."""
        for node in reversed(self._nodes):  # the other nodes' end while those here do
            node.close()

    # --- how it is done ---

    def _send(self, order: words.Order) -> None:
        message = words.encode(order)
        for node in reversed(self._nodes):  # it has a way to go to the others
            try:
                node.send(message)
            except OSError:
                self._bury(node)

    def _listen(self, patience_ms: int, *, hurried: bool, waited: list[_Rank] | None = None) -> None:
        """Takes in what ranks say; raises `GroupFailed` where one is gone, or is `hurried` and comes no further."""
        said = False
        for fd, _ in self._poll.poll(patience_ms):
            node = self._by_fd[fd]
            for report in node.hear(fd):
                said |= self._note(report, self._nodes.index(node))
        if said or not hurried:
            return
        if (seen := self.progress()) != self._seen:
            self._seen, self._moved = seen, time.monotonic()
        elif time.monotonic() - self._moved > self._timeout:
            # A stage waits for earlier stages alone.
            last = min(waited or self._ranks, key=lambda rank: (rank.stage, seen[rank.number]))
            self._nodes[last.node].show_stack(last.number)
            self._end(last, f"{last.full_name} hangs: nothing has moved for {self._timeout:g} seconds")

    def _note(self, report: Report, node: int) -> bool:
        """Takes in what a node tells; whether a rank has said something."""
        match report:
            case Started(pids):
                for rank, pid in zip(self._layout.on_node(node), pids, strict=True):
                    self._ranks[rank].pid = pid
            case Said(number, data, beside):
                self._hear(self._ranks[number], words.decode_reply(data), beside)
                return True
            case Ended(number, how):
                rank = self._ranks[number]
                self._end(rank, f"{rank.full_name} {how}")
            case _:
                pass  # marks: its node has kept them
        return False

    def _hear(self, rank: _Rank, reply: words.Reply, beside: bool) -> None:
        match reply:
            case Hello(said):
                rank.fingerprint = said
            case Retired() | StepLost() as step:
                rank.steps.append(step)
            case Answer() | Refused() as told:
                (rank.besides if beside else rank.answers).append(told)
            case Broken(message):
                self._end(rank, f"{rank.name} cannot go on: {message}")

    def _answers(self, method: str, replies: list[Answer | Refused]) -> list[Any]:
        refusals = [reply for reply in replies if isinstance(reply, Refused)]
        if len(refusals) == len(replies):
            error = ConfigError if refusals[0].kind == "ConfigError" else OSError
            raise error(refusals[0].message)
        for rank, reply in zip(self._ranks, replies, strict=True):
            if isinstance(reply, Refused):
                kind = RankRefused if reply.kind == "ConfigError" else GroupFailed
                self._end(rank, f"{rank.name} alone has refused {method}: {reply.message}", kind)
        kind = get_type_hints(getattr(Runner, method))["return"]
        return [words.decode_value(reply.value, kind) for reply in replies if isinstance(reply, Answer)]

    def _bury(self, node: Node) -> NoReturn:
        """A socket is broken: some rank is gone."""
        gone = node.buried()
        self._listen(_LISTEN_MS, hurried=False)  # what it said last
        self._end(self._ranks[gone.rank], f"{self._ranks[gone.rank].full_name} {gone.how}")

    def _end(self, cause: _Rank, message: str, kind: type[GroupFailed] = GroupFailed) -> NoReturn:
        """Ends all processes, and raises with what has happened."""
        for node in reversed(self._nodes):
            node.end(cause.number)
        raise kind(message)


def start_nodes(
    config: EngineConfig, runner: str, layout: Layout, wait: Callable[[], None], experts: CoreExperts | None
) -> list[Node]:
    """The ranks of this node, after those of all other nodes have been waited for."""
    if layout.nodes == 1:
        return [LocalNode(config, runner, 0, {}, wait, experts)]
    master = Master(config.parallel)
    links = master.gather(fingerprint(config))
    try:
        wires = connect(layout, 0, master.welcome(), config.parallel.timeout)
        own = LocalNode(config, runner, 0, wires, wait)
    except BaseException:
        for link in links:
            link.close()
        raise
    return [own, *(RemoteNode(layout, 1 + at, link) for at, link in enumerate(links))]
