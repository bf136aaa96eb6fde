"""From what a step has left on the host to its result."""

from collections.abc import Callable, Mapping

import numpy as np

from penstock.engine.core.plan import NONE, GraphStep, Int32, StepPlan, StepResult
from penstock.engine.runner.pooling import PooledStep
from penstock.engine.runner.sampler.adjustments import NOTHING_LEFT
from penstock.engine.runner.sampler.scores import PromptScores, SampledScores, not_finite_message
from penstock.engine.runner.verification import Verified
from penstock.kernels.sampling.buffers import Column

Explain = Callable[[Mapping[int, str]], dict[int, str]]
"""Of requests whose numbers are not finite, by index into the plan's rows, those that nobody has been told of yet: what is wrong,
and where it began."""


def read_result(
    plan: StepPlan,
    sampled: Int32,
    failed: Mapping[int, str],
    scores: SampledScores | None,
    prompts: PromptScores,
    vocab_size: int,
    explain: Explain,
    graph: GraphStep | None = None,
    pooled: PooledStep | None = None,
    verified: Verified | None = None,
) -> StepResult:
    """Makes the result.

    Args:
        plan: The step's.
        sampled: [r, RESULT]: what the sampler says of each of the plan's rows; undefined where the row does not sample.
        failed: Index into the plan's rows → what is wrong with that request, as far as the host knew before.
        scores: Of the sampled tokens, where requests want them.
        prompts: Of prompt tokens.
        vocab_size: Logits of a row.
        explain: Asked where numbers are not finite.
        graph: How the step was launched.
        pooled: Embeddings, in place of tokens.
        verified: What came of the step's drafts; `sampled` is what it says of each row then. None: there were none.
    """
    samples = plan.samples if pooled is None else np.zeros_like(plan.samples)
    failed = dict(failed)
    not_finite = dict(prompts.not_finite) if pooled is None else dict(pooled.not_finite)
    if np.count_nonzero(sampled[:, Column.NANS :]):
        for at in np.flatnonzero(sampled[:, Column.NANS :].any(1) & samples).tolist():
            nans, infinities = int(sampled[at, Column.NANS]), int(sampled[at, Column.INFINITIES])
            if nans or infinities:
                not_finite[at] = not_finite_message(nans, infinities, vocab_size)
            else:
                failed.setdefault(at, NOTHING_LEFT)
    told = explain(not_finite) if not_finite else {}
    counts = samples.astype(np.int32) if verified is None else verified.counts.copy()
    if failed or not_finite:
        failed |= not_finite | told
        counts[list(failed)] = 0
    kept, token_ids = None, np.where(samples, sampled[:, Column.TOKEN], np.int32(-1))[:, None]
    if verified is not None:
        kept, token_ids = None if scores is None else verified.kept, verified.token_ids
    logprobs, vectors = None if scores is None else scores.read(kept), None if pooled is None else pooled.pooled
    bad = np.array(list(told), np.int32) if told else NONE
    return StepResult(plan.step_id, token_ids, counts, logprobs, failed, prompts.logprobs, bad, graph, vectors)
