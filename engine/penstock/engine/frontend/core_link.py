"""One core of a replica as its frontend sees it: what it works on, what it says, and whether it can go on."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.metadata import version
from typing import Any, Protocol

from penstock.api import metrics as names
from penstock.api.load_report import LoadReport
from penstock.engine.commands import Command
from penstock.engine.config import ModelConfig
from penstock.engine.core.ipc.client import CoreError
from penstock.engine.frontend.data_parallel import busyness
from penstock.engine.frontend.egress import Egress
from penstock.engine.frontend.errors import unavailable
from penstock.engine.frontend.observe.metrics import EngineMetrics
from penstock.engine.frontend.progress import Progress
from penstock.engine.messages import AdapterInfo, AdaptersChanged, AddRequest, CoreReady, StepOutputs
from penstock.engine.stats import CoreStats

log = logging.getLogger(__name__)


class Core(Protocol):
    """What is used of `CoreClient`."""

    first_number: int
    """First number of this frontend's requests."""

    async def start(self) -> CoreReady: ...
    async def add(self, request: AddRequest) -> None: ...
    async def abort(self, indexes: Sequence[int]) -> None: ...
    async def call(self, command: Command) -> Any: ...
    def outputs(self) -> AsyncIterator[StepOutputs | CoreStats | AdaptersChanged]: ...
    async def close(self) -> None: ...


class CoreLink:
    """A core, its live requests and its counts.

    Args:
        core: Its client, not yet started.
        rank: Its number among the data-parallel ranks of the replica.
        model: The model served.
        block_size: Tokens in a KV block.
        watchdog_timeout: Seconds without progress after which it counts as hung.
        failed: Called once, when the core has failed; its requests have ended by then.
    """

    def __init__(
        self,
        core: Core,
        rank: int,
        model: ModelConfig,
        block_size: int,
        watchdog_timeout: float,
        failed: Callable[["CoreLink", str], None],
    ) -> None:
        self.core, self.rank = core, rank
        self.metrics = EngineMetrics(model.served_names[0], rank)
        self.egress = Egress(self.metrics)
        self.adapters: dict[str, AdapterInfo] = {}
        self.ready: CoreReady | None = None
        """What it said when it had started."""
        self.failure: str | None = None
        """Why it has failed; None: it has not."""
        self._model, self._block_size = model, block_size
        self._on_failure = failed
        self._watchdog_timeout = watchdog_timeout
        self.progress = Progress(time.monotonic(), watchdog_timeout)
        self._aborts: list[int] = []
        self._abort_wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def stats(self) -> CoreStats | None:
        """The newest; None before the first."""
        return self.metrics.stats

    @property
    def load(self) -> LoadReport | None:
        """The newest load report; None before the first."""
        return None if self.metrics.stats is None else self.metrics.stats.report

    @property
    def busy(self) -> int:
        """How much it has to do."""
        return busyness(self.load, len(self.egress))

    async def start(self) -> CoreReady:
        """Starts the core and returns when it has made its first forward pass; raises `CoreError` when it cannot."""
        self.ready = ready = await self.core.start()
        log.info("core ready: %d KV blocks, loaded in %.1f s", ready.num_blocks, sum(ready.load_seconds.values()))
        self._describe(ready)
        self._take_adapters(ready.adapters)
        self.progress = Progress(time.monotonic(), self._watchdog_timeout)
        self._tasks = [asyncio.create_task(self._drain_outputs()), asyncio.create_task(self._send_aborts())]
        return ready

    def _describe(self, ready: CoreReady) -> None:
        describe, model = self.metrics.describe, self._model
        for part, seconds in ready.load_seconds.items():
            describe(names.LOAD_SECONDS, "Seconds that each phase of the start took.", seconds, part=part)
        describe(names.LOAD_FLOOR_SECONDS, "Seconds that reading the weights takes at least.", ready.load_floor_s)
        what = {"dtype": model.dtype, "quantization": model.quantization_name, "kernels": ready.kernels}
        describe(names.ENGINE_INFO, "What runs.", version=version("penstock"), **what)
        blocks = {"block_size": str(self._block_size), "num_gpu_blocks": str(ready.num_blocks)}
        describe(names.CACHE_CONFIG_INFO, "The KV cache.", cache_dtype=model.kv_dtype or model.dtype, **blocks)

    def abort(self, indexes: list[int]) -> None:
        """One message for all that have gathered when the task gets its turn."""
        if indexes:
            self._aborts += indexes
            self._abort_wake.set()

    def stuck(self) -> str | None:
        """Why the core counts as hung, or None."""
        return self.progress.stuck(working=len(self.egress) > 0, now=time.monotonic())

    async def close(self) -> None:
        """Stops the core."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.core.close()

    async def _send_aborts(self) -> None:
        while True:
            await self._abort_wake.wait()
            self._abort_wake.clear()
            indexes, self._aborts = self._aborts, []
            await self.core.abort(indexes)

    async def _drain_outputs(self) -> None:
        try:
            async for message in self.core.outputs():
                now = time.monotonic()
                if isinstance(message, CoreStats):
                    self.metrics.stats = message
                    self.progress.stats(message, len(self.egress) > 0, now)
                elif isinstance(message, AdaptersChanged):
                    self._take_adapters(message.adapters)
                else:
                    self.progress.heard(now)
                    self.abort(await self.egress.process(message))
        except CoreError as error:
            self._fail(str(error))
        except Exception as error:  # a frame that cannot be read: nothing after it can be trusted either
            log.exception("the output loop failed")
            self._fail(f"the frontend cannot read the engine core's output: {error}")

    def _take_adapters(self, adapters: list[AdapterInfo]) -> None:
        self.adapters = {adapter.name: adapter for adapter in adapters}

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self.egress.fail_all(unavailable(f"the engine has failed: {reason}", "engine_dead"))
        self._on_failure(self, reason)
