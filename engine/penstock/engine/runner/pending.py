"""A step whose results are on their way to the host."""

from collections.abc import Callable
from typing import NamedTuple

from penstock.engine.core.plan import GraphStep, Int32, StepPlan, StepResult
from penstock.engine.core.row_table import RowTable
from penstock.engine.runner.device.runtime import StepRuntime, Transfer
from penstock.engine.runner.not_finite import Suspect
from penstock.engine.runner.pooling import PooledStep
from penstock.engine.runner.result import read_result
from penstock.engine.runner.sampler.scores import PromptParts, PromptScores, SampledScores
from penstock.engine.runner.verification import PlannedDrafts, verify


class PendingStep(NamedTuple):
    """What is needed to make the result of it, once `transfer` is over."""

    plan: StepPlan
    runtime: StepRuntime
    suspect: Suspect
    """Asked where logits are not finite."""
    transfer: Transfer
    sampled: Int32
    """[r, RESULT], or where there are drafts [m, RESULT] as `verify` takes it; pinned where the device has its own memory."""
    failed: dict[int, str]
    """Index into the plan's rows → what is wrong with that request, as far as the host knows."""
    scores: SampledScores | None
    """Of the sampled tokens, where requests want them."""
    prompts: PromptParts | None
    """Of prompt tokens, likewise."""
    rows: RowTable
    """The host's, which forget drafts that come to nothing."""
    vocab_size: int
    over: Callable[[], None]
    """To be called when what is pinned has been read."""
    graph: GraphStep | None = None
    """How the step was launched; None: without graphs."""
    pooled: PooledStep | None = None
    """Embeddings, in place of tokens."""
    drafts: PlannedDrafts | None = None
    """None: the step has none."""

    def result(self) -> StepResult:
        """Waits for it: the one wait of a step.

        Raises:
            DeviceFailed: It will never come.
        """
        try:
            self.transfer.wait()
            prompts = PromptScores() if self.prompts is None else self.prompts.read()
            sampled, verified = self.sampled, None
            if self.drafts is not None:
                verified = verify(self.plan, self.drafts, sampled)
                sampled = verified.judged
            given = self.plan, sampled, self.failed, self.scores, prompts, self.vocab_size
            result = read_result(*given, self.suspect.explain, self.graph, self.pooled, verified)
        except Exception as error:
            if (failure := self.runtime.failure(error)) is not None:
                raise failure from error
            raise
        self.over()
        if self.drafts is not None:
            self.rows.reject(self.plan, result.counts, self.suspect.live)
        return result
