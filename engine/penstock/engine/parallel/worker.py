"""The process of one rank: does what the core says, in the order in which it says it.

Two sockets lead to the core. Through one it rings for each message in shared memory and gets the replies; through the other come
calls that are safe beside a step, which a thread of their own answers. Either's end is the end of the core, and of this process,
whatever it is doing.
"""

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from importlib import import_module
from typing import Any, get_type_hints

import msgspec

from penstock.engine.config import ConfigError
from penstock.engine.core.executor import InlineExecutor, Runner, StepFailed
from penstock.engine.core.plan import StepResult
from penstock.engine.models.layers.shard import Stage
from penstock.engine.parallel import words
from penstock.engine.parallel.broadcast import Ring, messages
from penstock.engine.parallel.expert_group import expert_group
from penstock.engine.parallel.fingerprint import fingerprint
from penstock.engine.parallel.frames import receive_frame, send_frame
from penstock.engine.parallel.group import Group, Wires
from penstock.engine.parallel.shared_memory import SharedMemory
from penstock.engine.parallel.words import (
    Answer,
    Broken,
    Call,
    Hello,
    Refused,
    Reply,
    Retired,
    Sample,
    StepLost,
    Submit,
    WorkerStart,
)

log = logging.getLogger(__name__)


class Worker:
    """Carries out orders, one after the other.

    Args:
        start: Which rank it is.
        memory: That the ranks share; None: the rank is alone.
        replies: To the core.
    """

    def __init__(self, start: WorkerStart, memory: SharedMemory | None, replies: socket.socket) -> None:
        self._replies, parallel = replies, start.config.parallel
        number, rank = divmod(start.rank, parallel.tensor_parallel_size)
        stage = Stage(number, parallel.pipeline_parallel_size)
        module, _, name = start.runner.partition(":")
        make: Any = getattr(import_module(module), name)
        config, groups = start.config, dict[str, Any]()
        # The core knows more: it is to notice first.
        patience = 2 * config.parallel.timeout
        if memory is not None:
            groups["group"] = Group(
                rank,
                memory.world,
                memory,
                start.meeting,
                patience,
                config.cpu_isa,
                stage,
                start.before,
                start.after,
                Wires(start.outgoing, start.incoming, start.far_before, start.far_after),
                start.readers,
                start.page_memory,
            )
        if start.experts is not None:
            groups["expert_group"] = expert_group(start.experts, rank, parallel, patience, config.cpu_isa, number)
        self.runner: Runner = make(config, **groups)
        self._stage, self._tells = stage, stage.last and rank == 0
        self._steps = InlineExecutor(self.runner)

    def obey(self, order: words.Order) -> None:
        """Carries out one order."""
        match order:
            case Submit(plan, masked, sampled):
                for step in () if self._stage.last else sampled:
                    self.runner.follow(step)
                self._steps.submit(plan, masked)
                self.retire(waits=False)
            case Sample(inputs):
                self._steps.sample(inputs)
                self.retire(waits=False)
            case Call():
                self.retire(waits=True)
                self._reply(answer(self.runner, order))

    def retire(self, waits: bool) -> None:
        """Tells the results of steps that have been sampled; `waits` for those that are on their way too."""
        while self._steps.has_result(waits):
            try:
                reply = self._told(self._steps.collect())
            except StepFailed as error:
                reply = StepLost(str(error))
            self._reply(reply)

    def _told(self, step: StepResult) -> Reply:
        if not self._stage.last:
            return Retired(b"", None, step.encoder_s)  # it has no tokens to compare
        return Retired(words.digest_of(step), step if self._tells else None)

    def _reply(self, reply: Reply) -> None:
        send_frame(self._replies, words.encode(reply))


def answer(runner: Runner, call: Call) -> Reply:
    """Call a method and return its answer. Unexpected exceptions are raised."""
    method, hints = getattr(runner, call.method), get_type_hints(getattr(Runner, call.method))
    hints.pop("return")
    arguments = [
        msgspec.convert(value, kind, dec_hook=words.dec_hook) for value, kind in zip(call.arguments, hints.values(), strict=True)
    ]
    try:
        return Answer(msgspec.Raw(words.encode(method(*arguments))))
    except ConfigError as error:
        return Refused("ConfigError", str(error))
    except OSError as error:
        return Refused("OSError", str(error))


def main(main_fd: int, beside_fd: int) -> int:
    """Runs the rank that its first message describes. Takes its ends of the two sockets, and returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()  # the core aborts a rank that hangs: its stack is in the log
    bell, beside = socket.socket(fileno=main_fd), socket.socket(fileno=beside_fd)
    first = receive_frame(beside)
    if first is None:
        return 0
    start = words.decode_start(first)
    parallel, alone = start.config.parallel, start.world == 1
    name = "worker" if alone else f"rank {start.rank}"
    # What all ranks would say alike is said once.
    level = logging.WARNING if start.rank else logging.INFO
    logging.basicConfig(level=level, format=f"%(asctime)s %(levelname)s {name}: %(message)s")
    try:
        worker = Worker(start, None if alone else SharedMemory(start.memory, parallel.tensor_parallel_size), bell)
        send_frame(bell, words.encode(Hello(fingerprint(start.config))))
        threading.Thread(target=_beside, args=[worker.runner, beside], name="beside", daemon=True).start()
        ring, reader = Ring(start.ring, start.readers), start.rank % start.readers
        for order in messages(ring, reader, bell, words.decode_order):
            worker.obey(order)
            if not ring.holds_more(reader):
                worker.retire(waits=True)
    except ConnectionError:
        return 0
    except Exception as error:
        log.exception("the rank cannot go on")
        send_frame(bell, words.encode(Broken(f"{type(error).__name__}: {error}")))
        return 1
    return 0


def _beside(runner: Runner, stream: socket.socket) -> None:
    """Answers calls that are safe beside a step; ends the process with the core."""
    while (message := receive_frame(stream)) is not None:
        order = words.decode_order(message)
        assert isinstance(order, Call)
        send_frame(stream, words.encode(answer(runner, order)))
    os._exit(0)


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main(*map(int, sys.argv[1:])))
