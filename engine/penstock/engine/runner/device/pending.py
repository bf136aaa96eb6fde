"""A step whose results are on their way to the host."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from penstock.engine.core.plan import GraphStep, StepPlan, StepResult
from penstock.engine.runner.device.not_finite import Suspect
from penstock.engine.runner.device.runtime import DeviceRuntime, Transfer
from penstock.engine.runner.device.scores import PromptParts, SampledScores
from penstock.engine.runner.prompt_logprobs import PromptScores
from penstock.engine.runner.sampler.adjustments import NOTHING_LEFT
from penstock.engine.runner.sampler.sampler import not_finite_message
from penstock.kernels.sampling.buffers import Column


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
            result = self._read(self.sampled.numpy())
        except Exception as error:
            if (failure := self.runtime.failure(error)) is not None:
                raise failure from error
            raise
        self.over()
        return result

    def _read(self, sampled: np.ndarray) -> StepResult:
        plan, scored = self.plan, PromptScores() if self.prompts is None else self.prompts.read()
        failed, not_finite = dict(self.failed), dict(scored.not_finite)
        if sampled[:, Column.NANS :].any():
            for at in np.flatnonzero(sampled[:, Column.NANS :].any(1) & plan.samples).tolist():
                nans, infinities = int(sampled[at, Column.NANS]), int(sampled[at, Column.INFINITIES])
                if nans or infinities:
                    not_finite[at] = not_finite_message(nans, infinities, self.vocab_size)
                else:
                    failed[at] = NOTHING_LEFT
        told = self.suspect.explain(not_finite) if not_finite else {}
        failed |= not_finite | told
        counts = plan.samples.astype(np.int32)
        counts[list(failed)] = 0
        token_ids = np.where(plan.samples, sampled[:, Column.TOKEN], -1)[:, None].astype(np.int32)
        logprobs = None if self.scores is None else self.scores.read()
        bad = np.array(list(told), np.int32)
        return StepResult(plan.step_id, token_ids, counts, logprobs, failed, scored.logprobs, bad, self.graph)
