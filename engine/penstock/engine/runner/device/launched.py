"""A step that has been launched on a device: its tokens stay there for the next one, and a copy of them goes to the host."""

from typing import NamedTuple

import torch

from penstock.engine.attention.backends.phases import AttentionPhases
from penstock.engine.core.plan import GraphStep, Int32, StepPlan
from penstock.engine.runner.device.drafts import StepDrafts
from penstock.engine.runner.device.graphs.descriptor import GraphMode
from penstock.engine.runner.device.graphs.dispatcher import Dispatch
from penstock.engine.runner.device.graphs.step import Loaded
from penstock.engine.runner.device.program import Step, StepProgram
from penstock.engine.runner.device.rerun import rerun
from penstock.engine.runner.device.runtime import DeviceRuntime, Transfer
from penstock.engine.runner.device.staging import Staging
from penstock.engine.runner.not_finite import Again
from penstock.engine.runner.prompt_logprobs import PromptRows
from penstock.engine.runner.sampler.choice import Choosing
from penstock.kernels.sampling.buffers import Path


class Results(NamedTuple):
    """Where the results of one step are: [max_logits_rows, RESULT] each."""

    there: torch.Tensor
    """The program's."""
    here: torch.Tensor
    """On the host, pinned."""
    numbers: Int32
    """The same."""


def results_of(there: torch.Tensor, here: torch.Tensor) -> list[Results]:
    """Those of each slot, of tensors of one shape: [slots, max_logits_rows, RESULT]."""
    return [Results(*of, of[1].numpy()) for of in zip(there, here, strict=True)]


class Parts(NamedTuple):
    """What all steps of a device share."""

    runtime: DeviceRuntime
    program: StepProgram
    staging: Staging
    results: list[Results]
    """By the staging's slot."""
    loaded: Loaded
    attention: AttentionPhases


class LaunchedStep(NamedTuple):
    """A step that a device runs."""

    plan: StepPlan
    parts: Parts
    slot: int
    """Of the staging."""
    step: Step | None
    """None: the plan runs no row."""
    found: Dispatch
    """How it is launched."""
    drafts: StepDrafts | None
    starts: Int32
    """[r]: the position of each row's first token."""
    asked: PromptRows | None
    """The prompt tokens to score."""
    num_tokens: int
    """Of the plan, without padding."""

    each_row = True

    @property
    def whole(self) -> bool:
        """Whether the step's graph samples, too."""
        return self.found.mode is GraphMode.FULL and isinstance(self.found.descriptor.variant, Path)

    @property
    def graph(self) -> GraphStep:
        """How the step was launched; None: the device has no graphs."""
        found = self.found
        return GraphStep(found.mode.value, found.reason, self.num_tokens, found.descriptor.num_tokens)

    def again(self, at: list[int]) -> Again:
        """Prepares the tokens of some of the plan's rows for another run."""
        runtime, program, _, _, loaded, attention = self.parts
        return rerun(runtime, program, loaded, attention, self.plan, self.starts, at)

    def chosen(self, choosing: Choosing) -> tuple[torch.Tensor, torch.Tensor]:
        """See DeviceStep. The device knows positions before the host does."""
        step = self._running
        if self.drafts is None:
            return step.request.rows, step.inputs.seq_lens
        return step.request.rows.index_select(0, self.drafts.of), self.drafts.positions(step)

    def keep(self, choosing: Choosing, sampled: torch.Tensor) -> None:
        """Puts what the sampler gives, [m, RESULT], where the next step and `collect` find it."""
        program = self.parts.program
        if self.drafts is None:
            program.commit(self._running, sampled)
        else:
            self.drafts.commit(self._running, sampled, program.state)
            self.parts.results[self.slot].there[: len(sampled)].copy_(sampled)

    def advance(self) -> None:
        """Moves the rows on without tokens."""
        if self.step is not None:
            self.parts.program.advance(self.step)

    def skip(self) -> None:
        """Ends a step that failed: its rows move on without tokens."""
        if self.step is not None:
            self.parts.program.skip(self.step)
        self.parts.runtime.synchronize()
        self.over()

    def collect(self, others: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[Transfer, Int32]:
        """Begins to copy the results to the host, and other pairs of tensors with them."""
        count = len(self.plan.rows) if self.drafts is None else len(self.drafts.of)
        there, here, numbers = self.parts.results[self.slot]
        return self.parts.runtime.download([(there[:count], here[:count]), *others]), numbers[:count]

    def over(self) -> None:
        """The host has read the results."""
        self.parts.staging.over(self.slot)

    @property
    def _running(self) -> Step:
        assert self.step is not None, "a plan without rows samples nothing"
        return self.step
