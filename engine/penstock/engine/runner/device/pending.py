"""A step whose results are on their way to the host."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from penstock.engine.core.plan import GraphStep, StepPlan, StepResult
from penstock.engine.runner.device.runtime import DeviceRuntime, Transfer
from penstock.engine.runner.not_finite import Suspect
from penstock.engine.runner.result import read_result
from penstock.engine.runner.sampler.scores import PromptParts, PromptScores, SampledScores


class PendingStep(NamedTuple):
    """What is needed to make the result of it, once `transfer` is over."""

    plan: StepPlan
    runtime: DeviceRuntime
    transfer: Transfer
    sampled: torch.Tensor
    """[r, RESULT], int32, pinned."""
    failed: dict[int, str]
    """Index into the plan's rows → what is wrong with that request, as far as the host knows."""
    scores: SampledScores | None
    """Of the sampled tokens, where requests want them."""
    prompts: PromptParts | None
    """Of prompt tokens, likewise."""
    vocab_size: int
    over: Callable[[], None]
    """To be called when what is pinned has been read."""
    graph: GraphStep
    suspect: Suspect
    """Asked where logits are not finite."""

    def result(self) -> StepResult:
        """Waits for it: the one wait of a step.

        Raises:
            DeviceFailed: It will never come.
        """
        try:
            self.transfer.wait()
            prompts = PromptScores() if self.prompts is None else self.prompts.read()
            given = self.plan, self.sampled.numpy(), self.failed, self.scores, prompts, self.vocab_size
            result = read_result(*given, self.suspect.explain, self.graph)
        except Exception as error:
            if (failure := self.runtime.failure(error)) is not None:
                raise failure from error
            raise
        self.over()
        return result
