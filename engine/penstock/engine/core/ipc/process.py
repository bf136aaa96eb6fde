"""The core's process: the step loop between sockets.

It reads a `CoreStart` from its standard input, which stays open as long as the frontend lives: the end of it is the end of this
process, whatever it is doing.
"""

import faulthandler
import gc
import logging
import sys
import time
from importlib import import_module

from penstock.api.events import Event
from penstock.engine.cache.layout import KVLayout
from penstock.engine.config import ConfigError, EngineConfig
from penstock.engine.core.core import EngineCore
from penstock.engine.core.executor import RUNNERS, Executor, executor_of
from penstock.engine.core.ipc.boot_times import BootTimes
from penstock.engine.core.ipc.ports import FrontendGone, Port
from penstock.engine.core.ipc.publisher import EventPublisher
from penstock.engine.core.ipc.sockets import Context
from penstock.engine.core.ipc.starting import begun
from penstock.engine.core.ipc.vllm_publisher import VllmEventPublisher
from penstock.engine.core.memory import check_weights_fit, least, measure_memory, num_kv_blocks, offload_size, stored_bytes
from penstock.engine.core.wave import Wave
from penstock.engine.loading.bandwidth import load_floor_s
from penstock.engine.messages import CoreFailed, CoreReady, CoreStart
from penstock.engine.parallel.errors import RankRefused
from penstock.engine.parallel.expert_group import CoreExperts, expert_group
from penstock.engine.parallel.process_executor import ProcessExecutor

REPORT_INTERVAL_S = 0.05
"""Between two reports while something changes."""
HEARTBEAT_S = 1.0
"""Between two reports while nothing does."""
READ_POLL_MS = 1
"""Between two looks at what is being read, compiled or moved, while nothing else is there to do: a look takes 40 µs, and what a
request waits for comes later by the wait for it."""
IDLE_S = 0.1
"""Without work or a word from the frontend, after which the time is used for CUDA graphs."""

_log = logging.getLogger(__name__)


class CoreLoop:
    """Turns the engine core: inputs in, one step, outputs and events out; sleeps in poll while there is nothing to do.

    Args:
        core: What is turned.
        port: To the frontend, or to several.
        publisher: Of the event stream, if anybody may subscribe to it.
        vllm_publisher: Of the same in vLLM's form, if it was asked for.
        watchdog_timeout: Seconds of silence after which the log gets every thread's stack.
        wave: Its bells, if any, wake the core for the steps of others.
    """

    def __init__(
        self,
        core: EngineCore,
        port: Port,
        publisher: EventPublisher | None,
        watchdog_timeout: float,
        wave: Wave | None = None,
        vllm_publisher: VllmEventPublisher | None = None,
    ) -> None:
        self._watchdog_timeout = watchdog_timeout
        self._core = core
        self._send = port.send
        self._port = port
        self._publisher = publisher
        if publisher is not None:
            port.watch(publisher.replay_socket)
        self._vllm_publisher = vllm_publisher
        if vllm_publisher is not None:
            vllm_publisher.contents = core.scheduler.record_contents()
            if vllm_publisher.replay_socket is not None:
                port.watch(vllm_publisher.replay_socket)
        self._wave = wave
        if wave is not None:
            for bell in wave.bells:
                port.watch(bell)
        self._last_report = -HEARTBEAT_S
        self._watch_again = 0.0
        self._busy_until = time.monotonic()
        self._changed = True
        self._watch()

    def turn(self) -> None:
        """One turn: waits for input only when there is no other work."""
        # Everything that the cache has said is published before a replay reads the cache.
        if self._port.poll(self._patience_ms()):
            if self._wave is not None:
                self._wave.silence()
            for message in self._port.receive():
                self._core.handle(message)
                self._changed = True
            if self._publisher is not None:
                self._publish([])
                self._publisher.serve_replay(self._core.scheduler.cached_blocks)
            if self._vllm_publisher is not None:
                self._vllm_publisher.serve_replay()
            self._busy_until = time.monotonic()
        elif self._core.may_capture and time.monotonic() - self._busy_until >= IDLE_S:
            self._core.capture_graph()
            self._changed = True
        if self._core.has_work:
            self._changed, self._busy_until = True, time.monotonic()
        if self._core.next_command is not None:
            faulthandler.cancel_dump_traceback_later()
            self._watch_again = 0.0
            self._send(self._core.stats())  # it may take long, and must not pass for a hang
        if outputs := self._core.step():
            self._send(outputs)
        if adapters := self._core.take_adapters():
            self._send(adapters)
            self._last_report = -HEARTBEAT_S  # told at once, after the frontends: gateways hold requests for it
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
        that it comes even when an operator hangs and holds the lock. Each time begins another thread: so it is not done at every
        report, and the dump may come an eighth of its time early."""
        if (now := time.monotonic()) >= self._watch_again:
            faulthandler.dump_traceback_later(self._watchdog_timeout)
            self._watch_again = now + self._watchdog_timeout / 8

    def _patience_ms(self) -> int:
        if self._core.has_work:
            return 0
        interval = REPORT_INTERVAL_S if self._changed else HEARTBEAT_S
        patience = max(0, round(1000 * (self._last_report + interval - time.monotonic())))
        if self._core.may_capture:
            return min(patience, max(0, round(1000 * (self._busy_until + IDLE_S - time.monotonic()))))
        return min(patience, READ_POLL_MS) if self._core.is_reading else patience

    def _report(self) -> None:
        """Tells the frontend and the event stream; load at most every `REPORT_INTERVAL_S` and at least every `HEARTBEAT_S`."""
        now, news = time.monotonic(), list[Event]()
        if now - self._last_report >= (REPORT_INTERVAL_S if self._changed else HEARTBEAT_S):
            stats = self._core.stats()
            self._send(stats)
            self._watch()
            news.append(stats.report)
            self._last_report, self._changed = now, False
            self._core.check()
        self._publish(news)

    def _publish(self, news: list[Event]) -> None:
        batch = [*self._core.take_events(), *news]
        if batch and self._publisher is not None:
            self._publisher.publish(batch, time.time())
        if batch and self._vllm_publisher is not None:
            self._vllm_publisher.publish(batch, time.time())


def build_executor(
    config: EngineConfig, path: str | None = None, boot: BootTimes | None = None, experts: CoreExperts | None = None
) -> tuple[Executor, int]:
    """Whatever runs the plans, with weights and a cache and after its first forward pass, and the number of KV blocks.

    Args:
        config: The engine's.
        path: `module:Class` of the runner; None: the device's.
        boot: Told what it took.
        experts: The core's place among those whose ranks divide experts; None: it has all of each.
    """
    boot = boot or BootTimes()
    if config.device == "cpu":
        parallel = config.parallel
        # Of divided experts, what one rank needs is not known yet: not less than the whole, once.
        copies = 1 if parallel.expert_parallel else len(parallel.local_cores)
        check_weights_fit(config.model, stored_bytes(config.model.path), measure_memory(), parallel.nnodes, copies)
    executor = _start(config, path or RUNNERS[config.device], experts)
    boot.end("imports")
    try:
        executor.call("load")
        boot.end("weights")
        step_bytes = max(executor.call("profile_memory"))
        layout = _largest_layout(executor)
        num_blocks = num_kv_blocks(config, layout, least(executor.call("measure_memory")), step_bytes)
        boot.end("memory")
        executor.call("initialize_kv_cache", num_blocks)
        if (offload := offload_size(config, layout, executor.call("page_keeper"))) is not None:
            executor.call("initialize_offload", offload.pages)
        boot.end("cache")
        executor.call("warm_up")
        boot.end("warm_up")
    except RankRefused as error:  # what is wrong with the input, one rank alone may see
        executor.close()
        raise ConfigError(str(error)) from error
    except BaseException:
        executor.close()
        raise
    return executor, num_blocks


def _largest_layout(executor: Executor) -> KVLayout:
    """Of the rank with the largest pages: those of a pipeline stage with more layers are larger. Block tables fit all ranks."""
    layouts: list[KVLayout] = executor.call("kv_layout")
    return max(layouts, key=lambda layout: layout.page_bytes)


def weights_floor_s(config: EngineConfig) -> float:
    """Seconds that reading the weights takes at least; 0 where they are made up or cannot be read, which loading says better."""
    if config.model.load_format == "dummy":
        return 0.0
    try:
        return load_floor_s(sorted(config.model.path.glob("*.safetensors")))
    except OSError as error:
        _log.warning("the bandwidth of %s is not known: %s", config.model.path, error)
        return 0.0


def _start(config: EngineConfig, path: str, experts: CoreExperts | None) -> Executor:
    """What runs the plans, before it has loaded anything."""
    if config.parallel.worker_process or config.parallel.world > 1:
        return ProcessExecutor(config, path, experts)
    module, _, name = path.partition(":")
    make, parallel = getattr(import_module(module), name), config.parallel
    if experts is None:
        return executor_of(config, make(config))
    return executor_of(config, make(config, expert_group=expert_group(experts, 0, parallel, parallel.timeout, config.cpu_isa)))


def build_core(
    config: EngineConfig,
    executor: Executor,
    num_blocks: int,
    epoch: int,
    engine_index: int = 0,
    wave: Wave | None = None,
) -> EngineCore:
    """The core of an engine, with the adapters that it starts with."""
    layout, (ceilings, *_) = _largest_layout(executor), executor.call("ceilings")
    known = layout.groups, ceilings, offload_size(config, layout, executor.call("page_keeper"))
    core = EngineCore(config, executor, num_blocks, epoch, engine_index, *known, wave)
    try:
        core.open_connectors()
    except RankRefused as error:  # a port that is taken where one rank lends pages
        raise ConfigError(str(error)) from error
    if config.lora is not None:
        core.load_adapters(config.lora.modules)
    if core.may_capture:
        core.capture_graph()
    return core


def run(start: CoreStart, port: Port, context: Context) -> None:
    """Serves for ever; raises what makes that impossible."""
    boot, epoch = BootTimes(), int(time.time() * 1000)
    publisher = None
    if start.events_addresses and start.replay_addresses:
        # Bound before the weights are loaded: a port that is taken should not cost the wait.
        publisher = EventPublisher(context, epoch, start.events_addresses, start.replay_addresses)
    vllm_publisher = None
    if start.kv_events is not None:
        vllm_publisher = VllmEventPublisher(context, start.kv_events.of_rank(start.engine_index), start.engine_index)
    floor_s = weights_floor_s(start.config)
    boot.end("bandwidth")
    executor, num_blocks = build_executor(start.config, start.runner, boot, start.experts)
    wave = None if start.wave is None else Wave(start.wave, start.engine_index)
    core = build_core(start.config, executor, num_blocks, epoch, start.engine_index, wave)
    loop = CoreLoop(core, port, publisher, start.config.watchdog_timeout, wave, vllm_publisher)
    boot.end("adapters")
    ready = CoreReady(
        epoch,
        start.config.model.max_model_len,
        num_blocks,
        boot.seconds,
        floor_s,
        executor.call("kernels")[0],
        core.adapters(),
        event_ports=None if publisher is None else publisher.ports,
    )
    port.send(ready)
    _log.info("ready after %s with %d KV blocks of %d tokens", boot, num_blocks, start.config.cache.block_size)
    # What exists now stays: no collection need look at it again.
    gc.collect()
    gc.freeze()
    while True:
        loop.turn()


def main() -> int:
    """Runs the core described on standard input; returns 1 when it fails."""
    with begun() as (start, port, context):
        try:
            run(start, port, context)
        except FrontendGone:
            return 0
        except ConfigError as error:
            port.send(CoreFailed(str(error), refused=True))
        except Exception as error:
            port.send(CoreFailed(f"{type(error).__name__}: {error}"))
            raise
    return 1


if __name__ == "__main__":
    sys.exit(main())
