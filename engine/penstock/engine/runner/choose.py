"""From a step's logits to its tokens: what sampling does for the rows of a plan."""

from typing import NamedTuple

import numpy as np
import torch

from penstock.engine.config import LogprobsMode
from penstock.engine.core.plan import Int32, SampledLogprobs, StepPlan
from penstock.engine.runner.input_batch import InputBatch, StepInputs
from penstock.engine.runner.sampler.adjustments import describe_nothing_left
from penstock.engine.runner.sampler.greedy import greedy
from penstock.engine.runner.sampler.logprobs import RowLogprobs, gather_logprobs
from penstock.engine.runner.sampler.params import NO_LOGPROBS
from penstock.engine.runner.sampler.sampler import describe_not_finite, sample


class Choice(NamedTuple):
    """Of the m rows of a step that sample."""

    token_ids: Int32
    """[m]."""
    logprobs: SampledLogprobs | None
    failed: dict[int, str]
    """Index into the plan's rows → why that request's token counts for nothing."""
    not_finite: dict[int, str]
    """The same, of those whose logits are not finite."""


def choose(batch: InputBatch, plan: StepPlan, step: StepInputs, logits: torch.Tensor, mode: LogprobsMode) -> Choice:
    """Samples a step and tells the rows what came of it.

    Args:
        batch: The rows.
        plan: Of which some sample.
        step: Derived from it.
        logits: [m, vocab], float32, as the model gave them. Changed where they are not finite.
        mode: What logprobs are of.
    """
    not_finite = describe_not_finite(logits)
    if not_finite:
        # Their own tokens count for nothing; zeros keep them from disturbing what is computed over all rows.
        logits[list(not_finite)] = 0.0
    rows = batch.logits_rows(plan, step)
    adjusted = batch.adjustments.apply(logits, rows)
    failed = describe_nothing_left(adjusted) if adjusted is not logits else {}
    if failed:
        adjusted[list(failed)] = 0.0
    if batch.sampling.is_plain(rows.request_rows):
        tokens, logprobs = greedy(adjusted), None
    else:
        params = batch.sampling_batch(rows)
        sampled = sample(adjusted, params, lambda part, at: batch.adjustments.apply_invariant(part, rows.take(at.numpy())))
        asked = (params.logprobs != NO_LOGPROBS).nonzero().squeeze(-1)
        tokens, logprobs = sampled.token_ids, None
        if asked.numel():
            of = sampled.processed(adjusted) if mode.startswith("processed") else logits
            scores = gather_logprobs(of[asked], tokens[asked], params.logprobs[asked], normalised=mode.endswith("logprobs"))
            logprobs = _columns(scores, step.sampled_rows[asked.numpy()])
    failed |= batch.adjustments.failures(rows)
    token_ids = tokens.numpy().astype(np.int32)
    batch.write_sampled(rows, token_ids)

    def by_plan_row(messages: dict[int, str]) -> dict[int, str]:
        return {int(step.sampled_rows[row]): message for row, message in messages.items()}

    return Choice(token_ids, logprobs, by_plan_row(failed), by_plan_row(not_finite))


def _columns(scores: RowLogprobs, plan_rows: Int32) -> SampledLogprobs:
    return SampledLogprobs(
        plan_rows=plan_rows,
        sampled=scores.sampled.numpy(),
        ranks=scores.ranks.numpy().astype(np.int32),
        top_ids=scores.top_ids.numpy().astype(np.int32),
        top_logprobs=scores.top_logprobs.numpy(),
    )
