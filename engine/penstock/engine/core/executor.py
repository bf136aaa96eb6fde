"""Executors: where a plan runs. The core submits plans and collects results in the same order; how many may be in flight is its
business."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from penstock.engine.cache.layout import KVLayout
from penstock.engine.config import EngineConfig
from penstock.engine.connectors.moves import Lower, Move, Moved, PageFile
from penstock.engine.connectors.transfer.words import Errand, News, Part
from penstock.engine.core.memory import Memory
from penstock.engine.core.plan import GraphReport, SampledTokens, SampleInputs, StepPlan, StepResult
from penstock.engine.roofline import Ceilings
from penstock.engine.stats import ExpertStats

RUNNERS: Final = {
    "cpu": "penstock.engine.runner.model_runner:ModelRunner",
    "cuda": "penstock.engine.runner.device.device_runner:DeviceRunner",
}
"""`module:Class` of each device's runner."""


class StepFailed(RuntimeError):
    """A step came to nothing. Its plan has been applied: rows, blocks and weights are as they should be, its tokens are lost."""


class AdapterRead(msgspec.Struct, frozen=True):
    """How the reading of an adapter has ended on one rank."""

    error: str | None = None
    """What was wrong with it."""
    digest: bytes = b""
    """Digest of its weights."""


class Pending(Protocol):
    """A step that has been launched on a device."""

    def result(self) -> StepResult:
        """Waits for it."""
        ...


class Runner(Protocol):
    """A model on one device, with its KV cache and its rows."""

    def load(self) -> None:
        """Reads the weights; raises `ConfigError` where the checkpoint cannot be served."""
        ...

    def kernels(self) -> str:
        """The form of the model's operations in use."""
        ...

    def ceilings(self) -> Ceilings | None:
        """What the device can do, as measured when the weights were loaded; None: that was not done."""
        ...

    def kv_layout(self) -> KVLayout:
        """How the layers share the cache's pages."""
        ...

    def profile_memory(self) -> int:
        """Bytes that the largest step takes beside weights and KV cache; before the cache is allocated."""
        ...

    def measure_memory(self) -> Memory:
        """The device's memory, after `profile_memory` and before the cache is allocated."""
        ...

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocate the cache with that many pages."""
        ...

    def page_keeper(self) -> int:
        """Return the rank that stores, brings and sends pages for this one: itself, or a neighbour that has the same pages."""
        ...

    def initialize_offload(self, num_pages: int) -> None:
        """Allocate host memory for that many pages of the cache, or use that of the rank that keeps them."""
        ...

    def open_lower(self, name: Lower) -> list[PageFile]:
        """Opens a tier's place for the weights that are loaded, for pages in the host's memory; the pages that it has, the least
        recently used first. Raises `ConfigError` where it cannot be used. Empty on a rank that keeps none."""
        ...

    def move_pages(self, name: Lower, moves: list[Move]) -> None:
        """Begins to move pages between the host's memory and a tier behind it; safe beside a step."""
        ...

    def take_moved(self, name: Lower) -> dict[int, Moved]:
        """Moves that have ended since the last call, by number; safe beside a step."""
        ...

    def open_transfer(self, engine_id: str) -> Part:
        """Begins to lend and read pages of the weights that are loaded, under the engine's id; returns what this rank has of each
        page. Raises `ConfigError` where that cannot be."""
        ...

    def run_errands(self, errands: list[Errand]) -> None:
        """Does what is asked about pages at other replicas; safe beside a step."""
        ...

    def take_news(self) -> News:
        """What has become of pages at other replicas since the last call; safe beside a step."""
        ...

    def warm_up(self) -> None:
        """Makes a forward pass, so that the first request does not pay for what is done once."""
        ...

    def serve_others(self) -> None:
        """Takes part in a step of other cores, whose tokens need the experts here; nothing may be in flight."""
        ...

    def expert_stats(self) -> ExpertStats | None:
        """What experts have had to do, over all ranks that divide them; safe beside a step. None: they stay where they are."""
        ...

    def capture_graph(self) -> GraphReport | None:
        """Captures one more CUDA graph, where one is pending; nothing may be in flight. None: the device has none."""
        ...

    def sleep(self, level: int) -> None:
        """Gives the KV cache's memory back, at level 2 the weights' too."""
        ...

    def wake_up(self, tags: Sequence[str]) -> None:
        """Allocates again what sleeps, of `commands.TAGS`; weights given back come without content."""
        ...

    def check_weights(self, path: str | None) -> str | None:
        """Why weights cannot be read again from `path`, or from where they were read last; None: nothing is known against it. A
        rank knows of its own tensors alone."""
        ...

    def reload_weights(self, path: str | None) -> None:
        """Reads the weights again, from `path` or from where they were read last.

        Raises:
            ConfigError: They cannot be used, and nothing has changed. After any other error there are no weights.
        """
        ...

    def read_adapter(self, copy: int, uri: str, revision: str | None) -> None:
        """Begins to read an adapter into the host's memory, to be known by the number `copy`; safe beside a step."""
        ...

    def take_reads(self) -> dict[int, AdapterRead]:
        """Copies that have been read since the last call, each with how that ended; safe beside a step."""
        ...

    def drop_adapters(self, copies: Sequence[int]) -> None:
        """Frees the host's memory of copies."""
        ...

    def start_profile(self) -> None:
        """Profiles every step from the next one on."""
        ...

    def stop_profile(self, folder: Path) -> str:
        """Ends the profile; returns the file that it was written to."""
        ...

    def execute(self, plan: StepPlan) -> None:
        """Applies the plan and runs the forward pass."""
        ...

    def sample(self, inputs: SampleInputs) -> StepResult | Pending:
        """Samples the step executed last; where that runs on a device, it need not be over."""
        ...

    def follow(self, sampled: SampledTokens) -> None:
        """Takes in the tokens of a step that the last pipeline stage has sampled; an earlier stage's runner alone is asked."""
        ...


class Executor(Protocol):
    """Runs plans in the order in which they are submitted."""

    def submit(self, plan: StepPlan, masked: bool) -> None:
        """Begins a step. One that is not `masked` is sampled, too."""
        ...

    def sample(self, inputs: SampleInputs) -> None:
        """Sends the masks of the step submitted last, which is `masked`. Its forward pass may be running."""
        ...

    def collect(self) -> StepResult:
        """Waits for the oldest step; raises what its runner raised: after `StepFailed` the next step may follow."""
        ...

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every runner, after the steps submitted before, and waits.

        Returns:
            Its results in the order of ranks; an exception of one of them is raised here.
        """
        ...

    def call_beside(self, method: str, *args: Any) -> list[Any]:
        """The same at once, beside steps that run, of a method for which that is safe."""
        ...

    def check(self) -> None:
        """Raises `GroupFailed` where a process that runs plans has gone, while nothing is expected of it."""
        ...

    def close(self) -> None:
        """Ends whatever runs plans; nothing may be in flight."""
        ...


class InlineExecutor:
    """Runs each step at once, in the caller's thread. On a CPU nothing overlaps. On a device the step is launched at once, and
    only the caller that collects the result waits."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._results: deque[StepResult | Pending | StepFailed] = deque()
        self._failed: StepFailed | None = None

    def submit(self, plan: StepPlan, masked: bool) -> None:
        """Runs the forward pass."""
        try:
            self._runner.execute(plan)
        except StepFailed as error:
            self._failed = error
        if not masked:
            self.sample(SampleInputs(plan.step_id))

    def sample(self, inputs: SampleInputs) -> None:
        """Samples what the forward pass has left."""
        failed, self._failed = self._failed, None
        try:
            self._results.append(failed or self._runner.sample(inputs))
        except StepFailed as error:
            self._results.append(error)

    def has_result(self, waits: bool) -> bool:
        """Whether there is a result to collect. One that is on its way counts where the caller `waits` for it."""
        return bool(self._results) and (waits or isinstance(self._results[0], StepResult | StepFailed))

    def collect(self) -> StepResult:
        """The oldest result."""
        result = self._results.popleft()
        if isinstance(result, StepFailed):
            raise result
        return _retired(result)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls it in the caller's thread."""
        return [getattr(self._runner, method)(*args)]

    call_beside = call

    def check(self) -> None:
        """It runs in this process."""

    def close(self) -> None:
        """Do nothing: there is no other process."""


class ThreadExecutor:
    """Runs steps in one thread of their own, so that the next one is planned meanwhile: torch releases the interpreter's lock."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="runner")
        self._executing: deque[Future[None]] = deque()
        self._sampling: deque[Future[StepResult | Pending]] = deque()

    def submit(self, plan: StepPlan, masked: bool) -> None:
        """Queues the forward pass."""
        self._executing.append(self._thread.submit(self._runner.execute, plan))
        if not masked:
            self.sample(SampleInputs(plan.step_id))

    def sample(self, inputs: SampleInputs) -> None:
        """Queues the sampling behind it."""
        self._sampling.append(self._thread.submit(self._runner.sample, inputs))

    def collect(self) -> StepResult:
        """Waits for the oldest step."""
        executing, sampling = self._executing.popleft(), self._sampling.popleft()
        executing.result()
        return _retired(sampling.result())

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls it in the runner's thread."""
        return [self._thread.submit(getattr(self._runner, method), *args).result()]

    def call_beside(self, method: str, *args: Any) -> list[Any]:
        """Calls it in the caller's thread."""
        return [getattr(self._runner, method)(*args)]

    def check(self) -> None:
        """It runs in this process."""

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()


def _retired(step: StepResult | Pending) -> StepResult:
    """The result, waited for where it is on its way."""
    return step if isinstance(step, StepResult) else step.result()


def executor_of(config: EngineConfig, runner: Runner) -> Executor:
    """What runs the plans of an engine whose model is in this process."""
    # A device's steps overlap by themselves.
    return InlineExecutor(runner) if config.depth == 1 or config.device != "cpu" else ThreadExecutor(runner)
