"""Which of a prompt's own tokens a step scores, each given those before it."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.engine.core.plan import Int32, StepPlan
from penstock.engine.core.row_table import RowTable

NO_LOGPROBS = -1
"""Of a request that asks for none."""


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
