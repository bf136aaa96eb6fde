"""The core in the caller's process: the same client without a process, a socket or a message in bytes."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from penstock.engine.commands import Command
from penstock.engine.config import EngineConfig
from penstock.engine.core.core import EngineCore
from penstock.engine.core.ipc.boot_times import BootTimes
from penstock.engine.core.ipc.calls import Calls
from penstock.engine.core.ipc.client import CoreError
from penstock.engine.core.ipc.coupling import Coupling
from penstock.engine.core.ipc.process import HEARTBEAT_S, READ_POLL_MS, REPORT_INTERVAL_S, build_core, build_executor
from penstock.engine.messages import AbortRequests, AdaptersChanged, AddRequest, Control, CoreReady, StepOutputs
from penstock.engine.stats import CoreStats


class InprocClient:
    """A `CoreClient` that runs the step loop in the consumer of `outputs`. Each step blocks the event loop.

    Args:
        config: The engine's configuration.
        runner: `module:Class` of the model runner; None: the device's.
    """

    def __init__(self, config: EngineConfig, *, runner: str | None = None) -> None:
        self.first_number = 0
        self._config = config
        self._runner = runner
        self._core: EngineCore | None = None
        self._coupling = Coupling(config.parallel) if config.parallel.expert_ranks > 1 else None
        self._calls = Calls()
        self._wake = asyncio.Event()
        self._failure = "the engine core has not been started"

    async def start(self) -> CoreReady:
        """Loads the model and makes the first forward pass; raises `ConfigError` where it cannot be served."""
        boot, epoch = BootTimes(), int(time.time() * 1000)
        experts = None if self._coupling is None else self._coupling.experts(0)
        executor, num_blocks = build_executor(self._config, self._runner, boot, experts)
        self._core = build_core(self._config, executor, num_blocks, epoch)
        while self._core.may_capture:  # whoever calls from Python has no idle time to give
            self._core.capture_graph()
        boot.end("adapters")
        return CoreReady(epoch, self._config.model.max_model_len, num_blocks, boot.seconds, adapters=self._core.adapters())

    async def add(self, request: AddRequest) -> None:
        """Hands over one request; raises `CoreError` when the core has failed."""
        self._running().handle(request)
        self._wake.set()

    async def abort(self, indexes: Sequence[int]) -> None:
        """Ends requests; unknown and finished ones are ignored."""
        if self._core is not None:
            self._core.handle(AbortRequests(list(indexes)))
            self._wake.set()

    async def call(self, command: Command) -> Any:
        """Have the core execute a command; see `CoreClient.call`."""
        core = self._running()
        with self._calls.opened() as (call_id, done):
            core.handle(Control(call_id, command))
            self._wake.set()
            return await done

    async def outputs(self) -> AsyncIterator[StepOutputs | CoreStats | AdaptersChanged]:
        """Run the loop and yield the core's messages endlessly. Raises `CoreError` when the core fails."""
        core, reported = self._running(), 0.0
        while True:
            try:
                step = core.step()
                if not core.has_work:
                    core.check()
            except Exception as error:
                self._core, self._failure = None, f"{type(error).__name__}: {error}"
                self._calls.fail(CoreError(self._failure))
                raise CoreError(self._failure) from error
            if step is not None:
                yield step
            if (adapters := core.take_adapters()) is not None:
                yield adapters
            if replies := core.take_replies():
                yield core.stats()  # whoever reads an answer finds the state that it speaks of
                for reply in replies:
                    self._calls.settle(reply)
            core.take_events()  # nobody can subscribe to them
            if not core.has_work or time.monotonic() - reported >= REPORT_INTERVAL_S:
                reported = time.monotonic()
                yield core.stats()
            if core.has_work:
                await asyncio.sleep(0)
            else:
                with suppress(TimeoutError):  # what waits may have a deadline
                    await asyncio.wait_for(self._wake.wait(), READ_POLL_MS / 1000 if core.is_reading else HEARTBEAT_S)
            self._wake.clear()

    async def close(self) -> None:
        """Releases the model; safe to call twice."""
        if self._core is not None:
            self._core.close()
        if self._coupling is not None:
            self._coupling.close()
        self._core = None
        self._failure = "the engine core has been closed"

    def _running(self) -> EngineCore:
        if self._core is None:
            raise CoreError(self._failure)
        return self._core
