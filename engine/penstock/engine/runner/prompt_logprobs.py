"""Log probabilities of a prompt's own tokens, each given those before it."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.core.plan import Int32, PromptLogprobs, StepPlan
from penstock.engine.core.row_table import RowTable
from penstock.engine.runner.sampler.logprobs import gather_logprobs
from penstock.engine.runner.sampler.params import NO_LOGPROBS
from penstock.engine.runner.sampler.sampler import describe_not_finite

_ROWS_AT_ONCE = 256
"""Rows of logits in memory at a time: a long prompt's all together would be many times the size of a step."""


class PromptRows(NamedTuple):
    """p tokens of prompts that a step scores."""

    hidden_indices: npt.NDArray[np.int64]
    """[p]: of the step's tokens the one before each, whose logits say how likely it is."""
    plan_rows: Int32
    """[p]: indexes into the plan's rows."""
    positions: Int32
    """[p]: in the prompt."""
    token_ids: Int32
    """[p]."""
    counts: npt.NDArray[np.int64]
    """[p]: alternatives that the request asked for."""


def prompt_rows(plan: StepPlan, rows: RowTable, counts: npt.NDArray[np.int64]) -> PromptRows | None:
    """The prompt tokens whose logprobs a step gives; None where there are none.

    Args:
        plan: The step's.
        rows: To which it has been applied.
        counts: By row, what its request asks for; NO_LOGPROBS where it asks for none.
    """
    asked = counts[plan.rows]
    if (asked == NO_LOGPROBS).all():
        return None
    request = np.repeat(np.arange(len(plan.rows), dtype=np.int32), plan.num_new_tokens)
    starts = rows.num_computed[plan.rows] - plan.num_new_tokens
    offsets = np.arange(len(request), dtype=np.int32) - (np.cumsum(plan.num_new_tokens) - plan.num_new_tokens)[request]
    # Each token's logits are about the one after it.
    positions = (starts[request] + offsets + 1).astype(np.int32)
    of_prompt = positions < rows.num_prompt_tokens[plan.rows[request]]
    indices = np.flatnonzero(of_prompt & (asked[request] != NO_LOGPROBS))
    if not len(indices):
        return None
    request, positions = request[indices], positions[indices]
    return PromptRows(indices, request, positions, rows.token_ids[plan.rows[request], positions], asked[request])


class PromptScores(NamedTuple):
    """What came of them."""

    logprobs: PromptLogprobs | None = None
    not_finite: dict[int, str] = {}  # noqa: RUF012 (never changed)
    """Index into the plan's rows → what is wrong with that request's logits."""


def score_prompts(
    compute_logits: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, rows: PromptRows, normalised: bool = True
) -> PromptScores:
    """Scores prompt tokens, a part at a time.

    Args:
        compute_logits: The LM head, [x, hidden] → [x, vocab] float32; a row's result does not depend on the others.
        hidden: [n, hidden]: of the step's tokens.
        rows: What to score; not empty.
        normalised: Whether to give log probabilities, not logits.
    """
    broken: dict[int, str] = {}
    width = int(rows.counts.max())
    parts = []
    for start in range(0, len(rows.positions), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        logits = compute_logits(hidden[torch.from_numpy(rows.hidden_indices[part])])
        not_finite = describe_not_finite(logits)
        logits[list(not_finite)] = 0.0
        broken |= {int(rows.plan_rows[start + at]): message for at, message in not_finite.items()}
        token_ids = torch.from_numpy(rows.token_ids[part].astype(np.int64))
        parts.append(gather_logprobs(logits, token_ids, torch.from_numpy(rows.counts[part]), width, normalised))
    logprobs, ranks, top_ids, top_logprobs = (torch.cat(column).numpy() for column in zip(*parts, strict=True))
    columns = PromptLogprobs(
        plan_rows=rows.plan_rows,
        positions=rows.positions,
        token_ids=rows.token_ids,
        logprobs=logprobs,
        ranks=ranks.astype(np.int32),
        top_ids=top_ids.astype(np.int32),
        top_logprobs=top_logprobs,
    )
    return PromptScores(columns, broken)
