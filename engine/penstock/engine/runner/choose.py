"""From a step's logits to its tokens: what sampling does for the rows of a plan."""

from typing import NamedTuple

import numpy as np
import torch

from penstock.engine.config import LogprobsMode
from penstock.engine.core.plan import Int32, SampledLogprobs, StepPlan
from penstock.engine.runner.input_batch import InputBatch, StepInputs
from penstock.engine.runner.sampler.adjustments import describe_nothing_left
from penstock.engine.runner.sampler.logprobs import gather_logprobs
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
    # Their own tokens count for nothing; zeros keep them from disturbing what is computed over all rows.
    logits[list(not_finite)] = 0.0
    params, rows = batch.sampling_batch(plan, step), batch.logits_rows(plan, step)
    adjusted = batch.adjustments.apply(logits, rows)
    failed = describe_nothing_left(adjusted) if adjusted is not logits else {}
    adjusted[list(failed)] = 0.0
    sampled = sample(adjusted, params, lambda part, at: batch.adjustments.apply_invariant(part, rows.take(at.numpy())))
    failed |= batch.adjustments.failures(rows)
    token_ids = sampled.token_ids.numpy().astype(np.int32)
    batch.write_sampled(plan, step, token_ids)

    asked = (params.logprobs != NO_LOGPROBS).nonzero().squeeze(-1)
    logprobs = None
    if asked.numel():
        of = sampled.processed(adjusted) if mode.startswith("processed") else logits
        found = gather_logprobs(of[asked], sampled.token_ids[asked], params.logprobs[asked], normalised=mode.endswith("logprobs"))
        logprobs = SampledLogprobs(
            plan_rows=step.sampled_rows[asked.numpy()],
            sampled=found.sampled.numpy(),
            ranks=found.ranks.numpy().astype(np.int32),
            top_ids=found.top_ids.numpy().astype(np.int32),
            top_logprobs=found.top_logprobs.numpy(),
        )

    def by_plan_row(messages: dict[int, str]) -> dict[int, str]:
        return {int(step.sampled_rows[row]): message for row, message in messages.items()}

    return Choice(token_ids, logprobs, by_plan_row(failed), by_plan_row(not_finite))
