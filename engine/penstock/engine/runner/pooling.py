"""Embeddings: what is kept of the hidden states of a prompt, chunk by chunk."""

from typing import NamedTuple

import numpy as np
import torch

from penstock.engine.config import PooledTokens
from penstock.engine.core.plan import Float32, Int32, Pooled, StepPlan, ints

NOT_FINITE = "the hidden states are not finite"


class PooledStep(NamedTuple):
    """What a step gave."""

    pooled: Pooled
    not_finite: dict[int, str]
    """Index into the plan's rows → what is wrong with that request's hidden states."""


class Pooler:
    """Pools the rows of successive steps. A row's result depends neither on the others nor on how its prompt was cut: float32
    sums are made token by token.

    Args:
        tokens: Which hidden states make an embedding.
        size: Elements of each.
    """

    def __init__(self, tokens: PooledTokens, size: int) -> None:
        self._tokens = tokens
        self._size = size
        self._kept: dict[int, Float32] = {}
        """Row → what its chunks so far gave: the sum, or the first token's. A row's next tenant begins anew."""

    def pool(self, plan: StepPlan, starts: Int32, hidden: torch.Tensor) -> PooledStep:
        """Takes in a step; rows that reach the end of their prompts are pooled.

        Args:
            plan: The step's.
            starts: [r]: for each of its rows, the position of the first new token.
            hidden: [n, size]: of the step's tokens.
        """
        vectors: dict[int, Float32] = {}
        not_finite: dict[int, str] = {}
        ends = np.cumsum(plan.num_new_tokens)
        for at, (row, start, end) in enumerate(zip(ints(plan.rows), ints(starts), ints(ends), strict=True)):
            own = hidden[end - int(plan.num_new_tokens[at]) : end]
            found = self._take(row, start, own, ends_prompt=bool(plan.samples[at]))
            if found is not None and not np.isfinite(found).all():
                not_finite[at] = NOT_FINITE
            elif found is not None and plan.samples[at]:
                vectors[at] = found / np.float32(start + len(own)) if self._tokens == "mean" else found
        columns = np.stack(list(vectors.values())) if vectors else np.empty((0, self._size), np.float32)
        return PooledStep(Pooled(np.array(list(vectors), np.int32), columns), not_finite)

    def _take(self, row: int, start: int, own: torch.Tensor, *, ends_prompt: bool) -> Float32 | None:
        """What a row has so far, [size]; None where that is nothing yet."""
        match self._tokens:
            case "last":
                return own[-1].float().numpy() if ends_prompt else None
            case "first":
                if start == 0:
                    self._kept[row] = own[0].float().numpy().copy()
            case "mean":
                if start == 0:
                    self._kept[row] = np.zeros(self._size, np.float32)
                for token in own.float().numpy():
                    self._kept[row] += token
        return self._kept[row]
