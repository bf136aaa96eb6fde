"""Rows that cannot be served: their tokens are outside the vocabulary."""

import numpy as np

from penstock.engine.core.plan import Int32, StepPlan


class Refusals:
    """Noted at admission, told with each step of such a row.

    Args:
        vocab_size: Of the model.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._refused: dict[int, str] = {}

    def admit(self, row: int, tokens: Int32) -> None:
        """Looks at a row's tokens, [n]; those outside the vocabulary become 0, harmless for the step that they are in."""
        self._refused.pop(row, None)
        outside = (tokens < 0) | (tokens >= self._vocab_size)
        if outside.any():
            first = int(np.argmax(outside))
            self._refused[row] = f"token {tokens[first]} at position {first} is outside the vocabulary of {self._vocab_size}"
            tokens[outside] = 0

    def release(self, rows: Int32) -> None:
        """Forgets rows."""
        for row in rows.tolist():
            self._refused.pop(row, None)

    def of(self, plan: StepPlan) -> dict[int, str]:
        """Index into the plan's rows → why that request cannot be served."""
        if not self._refused:
            return {}
        return {index: self._refused[row] for index, row in enumerate(plan.rows.tolist()) if row in self._refused}
