"""The core's process: the step loop between sockets.

It reads a `CoreStart` from its standard input, which stays open as long as the frontend lives: the end of it is the end of this
process, whatever it is doing. Signals meant for the whole process group are the frontend's to handle, who lets running requests
finish first.
"""

import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import BinaryIO

import zmq

from penstock.api.events import Event
from penstock.engine import messages
from penstock.engine.config import ConfigError, EngineConfig
from penstock.engine.core.core import EngineCore
from penstock.engine.core.executor import Runner, executor_of
from penstock.engine.core.ipc.ports import Port, SharedPort, SinglePort
from penstock.engine.core.ipc.publisher import EventPublisher
from penstock.engine.core.memory import measure_memory, num_kv_blocks
from penstock.engine.messages import CoreFailed, CoreReady, CoreStart

REPORT_INTERVAL_S = 0.05
"""Between two reports while something changes."""
HEARTBEAT_S = 1.0
"""Between two reports while nothing does."""

_log = logging.getLogger(__name__)


class CoreLoop:
    """Turns the engine core: inputs in, one step, outputs and events out; sleeps in poll while there is nothing to do.

    Args:
        core: What is turned.
        port: To the frontend, or to several.
        publisher: Of the event stream, if anybody may subscribe to it.
        watchdog_timeout: Seconds of silence after which the log gets every thread's stack.
    """

    def __init__(self, core: EngineCore, port: Port, publisher: EventPublisher | None, watchdog_timeout: float) -> None:
        self._watchdog_timeout = watchdog_timeout
        self._core = core
        self._send = port.send
        self._port = port
        self._publisher = publisher
        self._poller = zmq.Poller()
        for socket in port.sockets:
            self._poller.register(socket, zmq.POLLIN)
        if publisher is not None:
            self._poller.register(publisher.replay_socket, zmq.POLLIN)
        self._last_report = -HEARTBEAT_S
        self._changed = True
        self._watch()

    def turn(self) -> None:
        """One turn: waits for input only when there is no other work."""
        # Everything that the cache has said is published before a replay reads the cache.
        if dict(self._poller.poll(self._patience_ms())):
            for message in self._port.receive():
                self._core.handle(message)
                self._changed = True
            if self._publisher is not None:
                self._publish([])
                self._publisher.serve_replay(self._core.scheduler.kv.cached_hashes)
        self._changed |= self._core.has_work
        if self._core.next_command is not None:
            faulthandler.cancel_dump_traceback_later()
            self._send(self._core.stats())  # it may take long, and must not pass for a hang
        if outputs := self._core.step():
            self._send(outputs)
        self._reply()
        self._report()

    def _reply(self) -> None:
        if replies := self._core.take_replies():
            self._send(self._core.stats())  # whoever reads an answer finds the state that it speaks of
            self._watch()
            for reply in replies:
                self._send(reply)

    def _watch(self) -> None:
        """Puts the dump off: it comes when nothing is reported for long. From a thread of its own that needs no interpreter, so
        that it comes even when an operator hangs and holds the lock."""
        faulthandler.dump_traceback_later(self._watchdog_timeout)

    def _patience_ms(self) -> int:
        if self._core.has_work:
            return 0
        interval = REPORT_INTERVAL_S if self._changed else HEARTBEAT_S
        return max(0, round(1000 * (self._last_report + interval - time.monotonic())))

    def _report(self) -> None:
        """Tells the frontend and the event stream; load at most every `REPORT_INTERVAL_S` and at least every `HEARTBEAT_S`."""
        now, news = time.monotonic(), list[Event]()
        if now - self._last_report >= (REPORT_INTERVAL_S if self._changed else HEARTBEAT_S):
            stats = self._core.stats()
            self._send(stats)
            self._watch()
            news.append(stats.report)
            self._last_report, self._changed = now, False
        self._publish(news)

    def _publish(self, news: list[Event]) -> None:
        batch = [*self._core.take_events(), *news]
        if batch and self._publisher is not None:
            self._publisher.publish(batch, time.time())


def build_runner(config: EngineConfig, path: str) -> tuple[Runner, int]:
    """A runner with its weights and cache that has made its first forward pass, and the number of its KV blocks.

    Args:
        config: The engine's.
        path: `module:Class`.
    """
    module, _, name = path.partition(":")
    runner: Runner = getattr(import_module(module), name)(config)
    runner.load()
    num_blocks = num_kv_blocks(config, runner.kv_layout(), measure_memory(), runner.profile_memory())
    runner.initialize_kv_cache(num_blocks)
    runner.warm_up()
    return runner, num_blocks


def build_core(config: EngineConfig, runner: Runner, num_blocks: int, epoch: int, engine_index: int = 0) -> EngineCore:
    """The core of an engine with one rank."""
    return EngineCore(config, executor_of(config, runner), num_blocks, epoch, engine_index, runner.kv_layout().groups)


def run(start: CoreStart, port: Port, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    """Serves for ever; raises what makes that impossible."""
    began = time.time()
    epoch = int(began * 1000)
    publisher = None
    if start.events_address is not None and start.replay_address is not None:
        # Bound before the weights are loaded: a port that is taken should not cost the wait.
        publisher = EventPublisher(context, epoch, start.events_address, start.replay_address)
    runner, num_blocks = build_runner(start.config, start.runner)
    core = build_core(start.config, runner, num_blocks, epoch, start.engine_index)
    loop = CoreLoop(core, port, publisher, start.config.watchdog_timeout)
    ready = CoreReady(epoch, start.config.model.max_model_len, num_blocks, time.time() - began, runner.kernels)
    port.send(ready)
    _log.info("ready after %.1f s with %d KV blocks of %d tokens", ready.load_seconds, num_blocks, start.config.cache.block_size)
    # What exists now stays: no collection need look at it again.
    gc.collect()
    gc.freeze()
    while True:
        loop.turn()


def main() -> int:
    """Runs the core described on standard input; returns 1 when it fails."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s core: %(message)s")
    start = read_start(sys.stdin.buffer)
    threading.Thread(target=_end_with_frontend, args=[start.address], name="frontend-watch", daemon=True).start()
    context = zmq.Context[zmq.Socket[bytes]]()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, messages.core_identity(start.engine_index))
    socket.set_hwm(0)
    socket.connect(start.address)
    port = SharedPort(socket, context, start.frontends_address) if start.frontends_address else SinglePort(socket)
    try:
        run(start, port, context)
    except ConfigError as error:
        port.send(CoreFailed(str(error), refused=True))
    except Exception as error:
        port.send(CoreFailed(f"{type(error).__name__}: {error}"))
        raise
    finally:
        context.destroy(linger=1000)
    return 1


def read_start(stream: BinaryIO) -> CoreStart:
    """The start message: four bytes of length, little endian, then msgpack. Raises `EOFError` where the stream ends before."""
    size = stream.read(4)
    body = stream.read(int.from_bytes(size, "little"))
    if len(size) < 4 or len(body) < int.from_bytes(size, "little"):
        raise EOFError("standard input holds no start message: this module is started by penstock.engine.core.ipc.client")
    return messages.decode_start(body)


def _end_with_frontend(address: str) -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    # A frontend that was killed while the model loaded has left the socket's folder behind.
    path = Path(address.removeprefix("ipc://"))
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
