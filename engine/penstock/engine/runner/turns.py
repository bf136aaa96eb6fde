"""A step, on every device: `execute` and `sample` take turns, and an error in them is that step's failure alone.

Devices differ in three places only: how a plan's rows become inputs (`_begin`), how the model runs (`_forward`), and where
sampled tokens go (`DeviceStep`).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from penstock.engine.core.executor import StepFailed
from penstock.engine.core.plan import GraphStep, Int32, SampleInputs, StepPlan
from penstock.engine.models.layers.comm import Comm
from penstock.engine.parallel.errors import GroupFailed
from penstock.engine.runner.device.runtime import StepRuntime, Transfer
from penstock.engine.runner.not_finite import Again, NotFinite, Suspect
from penstock.engine.runner.own_drafts import Clock, OwnDrafts
from penstock.engine.runner.pending import PendingStep
from penstock.engine.runner.pooling import PooledStep
from penstock.engine.runner.prompt_logprobs import PromptRows
from penstock.engine.runner.requests import Requests
from penstock.engine.runner.sampler.choice import Choosing
from penstock.engine.runner.sampler.scores import PromptParts, pairs
from penstock.engine.runner.verification import PlannedDrafts, planned_drafts

Runtime = TypeVar("Runtime", bound=StepRuntime)
"""The device."""


class Forward(NamedTuple):
    """What a step's forward pass leaves for its sampling."""

    logits: torch.Tensor | None = None
    """[m, vocab]; None: no row samples."""
    prompts: PromptParts | None = None
    """Scores of prompt tokens, where requests want them."""
    pooled: PooledStep | None = None
    """Embeddings; None: the engine generates."""
    failed: dict[int, str] = {}  # noqa: RUF012 (never changed)
    """Index into the plan's rows → why that row cannot be computed."""
    sampled: bool = False
    """Whether a graph has sampled as well."""


class DeviceStep(Protocol):
    """A step on one kind of device."""

    @property
    def each_row(self) -> bool:
        """Whether in a step without drafts all rows of the plan have logits, and not only those that sample."""
        ...

    @property
    def graph(self) -> GraphStep | None:
        """How the step was launched; None: the device has no graphs."""
        ...

    def again(self, at: list[int]) -> Again:
        """Prepares the tokens of some of the plan's rows for another run."""
        ...

    def chosen(self, choosing: Choosing) -> tuple[torch.Tensor, torch.Tensor]:
        """On the device, the request row and the position of the token that each row of logits chooses."""
        ...

    def keep(self, choosing: Choosing, sampled: torch.Tensor) -> None:
        """Puts what the sampler gives, [m, RESULT], where the next step and `collect` find it."""
        ...

    def advance(self) -> None:
        """Moves the rows on without tokens."""
        ...

    def skip(self) -> None:
        """Ends a step that failed: its rows move on without tokens."""
        ...

    def collect(self, others: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[Transfer, Int32]:
        """Begins to copy the results to the host, and other pairs of tensors with them.

        Returns:
            The copies, and where the results will be: as `PendingStep.sampled`.
        """
        ...

    def over(self) -> None:
        """The host has read the results."""
        ...


Step = TypeVar("Step", bound=DeviceStep)
"""A step on this device."""
Sampled = TypeVar("Sampled", covariant=True)
"""What `sample` returns."""


class Launched(NamedTuple, Generic[Step]):
    """What `execute` leaves for `sample`."""

    plan: StepPlan
    step: Step
    forward: Forward
    suspect: Suspect
    drafts: PlannedDrafts | None
    """None: the step has none."""


def _nothing() -> None:
    """Undoes nothing."""


class Turns(ABC, Generic[Runtime, Step, Sampled]):
    """The steps of a runner.

    Args:
        runtime: The device.
    """

    _requests: Requests
    _not_finite: NotFinite
    _comm: Comm
    _max_logits_rows: int
    """Of a step."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self.runtime = runtime
        self._launched: Launched[Step] | None = None
        self._own_drafts: OwnDrafts | None = None
        self._inference = torch.inference_mode()
        """Entered by each turn: as a decorator it would be made anew for every call."""

    # --- what differs ---

    @abstractmethod
    def _limit_threads(self) -> None:
        """Called first in each step."""

    @abstractmethod
    def _begin(self, plan: StepPlan, starts: Int32, drafts: PlannedDrafts | None, asked: PromptRows | None) -> Step:
        """Brings the inputs of a step to the device.

        Args:
            plan: The step's, which the rows have taken in.
            starts: [r]: the position of each row's first token.
            drafts: The plan's; None: there are none.
            asked: The prompt tokens to score; None: there are none.
        """

    @abstractmethod
    def _forward(self, step: Step) -> Forward:
        """Runs or launches the model."""

    @abstractmethod
    def _ended(self, step: Step, pending: PendingStep) -> Sampled:
        """What `sample` returns."""

    def _clock(self) -> float:
        """Seconds, by which steps are compared."""
        return time.perf_counter()

    @property
    def _draft_clock(self) -> Clock:
        return Clock(lambda: self._clock(), self._comm.agree)

    # --- what does not ---

    def _execute(self, plan: StepPlan) -> Launched[Step]:
        """Applies a plan, and runs or launches the forward pass."""
        self._limit_threads()
        drafts, requests = self._planned(plan), self._requests
        starts = requests.take_in(plan)
        step = self._begin(plan, starts, drafts, requests.chooser.prompt_rows(plan, requests.rows))
        suspect = self._not_finite.watch(plan, step.again)
        with self._failing(plan, step.skip):
            forward = self._forward(step)
        self._comm.check()
        return Launched(plan, step, forward, suspect, drafts)

    def _planned(self, plan: StepPlan) -> PlannedDrafts | None:
        """The drafts that a step verifies, those of the plan and of the runner."""
        own = self._own_drafts
        if own is not None:
            own.apply(plan, self._requests.rows)
        if not len(plan.num_drafts):
            return None
        drafts = planned_drafts(plan, self._next_drafts)
        if len(drafts.of) > self._max_logits_rows:
            most = self._max_logits_rows
            raise ValueError(f"step {plan.step_id} chooses {len(drafts.of)} tokens, where there is room for {most}")
        return drafts

    @property
    def _next_drafts(self) -> Int32 | None:
        """[rows, K]: what the runner keeps for each row's next step, -1 pads; None: it keeps none."""
        return None if self._own_drafts is None else self._own_drafts.drafts

    def _sample(self, launched: Launched[Step], inputs: SampleInputs) -> Sampled:
        """Samples, or launches the sampling of, the step that `_execute` has left."""
        plan, step, forward, suspect, drafts = launched
        if forward.sampled and len(inputs.masked_rows):
            raise RuntimeError(f"step {plan.step_id} has been sampled in a graph, and its masks come too late: no row was guided")
        requests, scores, failed = self._requests, None, self._requests.refusals.of(plan) | forward.failed
        with self._failing(plan, step.skip):
            if forward.logits is None:
                step.advance()
            elif not forward.sampled:
                choosing, own = requests.choosing(plan, drafts, each_row=step.each_row), self._own_drafts
                drawn = None if drafts is None or own is None else own.drawn(plan, drafts)
                choice = requests.chooser.choose(choosing, forward.logits, *step.chosen(choosing), inputs, drawn)
                scores, failed = choice.scores, failed | choice.failed
                step.keep(choosing, choice.result)
        transfer, sampled = step.collect(pairs(scores, forward.prompts))
        pending = PendingStep(
            plan=plan,
            runtime=self.runtime,
            suspect=suspect,
            transfer=transfer,
            sampled=sampled,
            failed=failed,
            scores=scores,
            prompts=forward.prompts,
            rows=requests.rows,
            vocab_size=requests.vocab_size,
            over=step.over,
            graph=step.graph,
            pooled=forward.pooled,
            drafts=drafts,
        )
        return self._ended(step, pending)

    def execute(self, plan: StepPlan) -> None:
        """Applies a plan and begins the forward pass; `sample` must follow before the next.

        Raises:
            RuntimeError: The last step has not been sampled: its tokens are not there for this one.
            StepFailed: The forward pass did not get through, or could not be launched.
            DeviceFailed: The device is lost.
        """
        if self._launched is not None:
            raise RuntimeError(f"step {plan.step_id}: step {self._launched.plan.step_id} has not been sampled yet")
        with self._inference, self.runtime.main_stream():
            self._launched = self._execute(plan)

    def sample(self, inputs: SampleInputs) -> Sampled:
        """Samples the step that `execute` has begun, and writes the tokens into their rows.

        Raises:
            RuntimeError: No step waits for it, or another one does.
            StepFailed: The sampling did not get through, or could not be launched.
            DeviceFailed: The device is lost.
        """
        launched = self._launched
        if launched is None or launched.plan.step_id != inputs.step_id:
            waiting = "none" if launched is None else f"step {launched.plan.step_id}"
            raise RuntimeError(f"sampling step {inputs.step_id}: {waiting} waits for it")
        self._launched = None
        with self._inference, self.runtime.main_stream():
            return self._sample(launched, inputs)

    def _failing(self, plan: StepPlan, undo: Callable[[], None] = _nothing) -> "_Failing":
        return _Failing(self.runtime, plan, undo)


class _Failing:
    """What goes wrong within is the step's failure alone: the plan has been applied, and `undo` and the release of its rows undo
    the rest. Where the device or another rank is gone, there is no next step."""

    def __init__(self, runtime: StepRuntime, plan: StepPlan, undo: Callable[[], None]) -> None:
        self._runtime, self._plan, self._undo = runtime, plan, undo

    def __enter__(self) -> None:
        """Nothing has gone wrong yet."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Raises what an error within means to the caller."""
        if not isinstance(error, Exception) or isinstance(error, GroupFailed):
            return
        if (failure := self._runtime.failure(error)) is not None:
            raise failure from error
        self._undo()
        raise StepFailed(f"step {self._plan.step_id} failed: {type(error).__name__}: {error}") from error
