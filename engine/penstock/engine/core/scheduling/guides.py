"""Guides say which tokens may come next in a request: a grammar's state, for one.

A guide knows accepted tokens alone, so that its mask for a step is there only when the step before has been taken in. Where it
leaves no choice it forces tokens, which are verified as drafts in one step; such a row is in one plan at a time.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from penstock.engine.core.plan import Bool, Int32, SampleInputs, StepPlan, ints

_ALL = -1
"""A word with all bits set."""


class Guide(Protocol):
    """Of one request."""

    @property
    def num_words(self) -> int:
        """Words of a mask, the same for all guides of an engine."""
        ...

    def forced(self) -> Sequence[int]:
        """The tokens that must come next, as far as there is no choice."""
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advances: these tokens are the request's now."""
        ...

    def fill(self, masks: Int32, drafts: Sequence[int]) -> None:
        """Writes the masks of a step that verifies drafts; the guide stays where it is.

        Args:
            masks: [1 + drafts, words], all bits set: row i is for the token after the first i drafts. Rows after a draft that
                may not come where it stands do not matter.
            drafts: The step's.
        """
        ...


class Guides:
    """Of the rows that have one."""

    def __init__(self) -> None:
        self._guides: dict[int, Guide] = {}
        self._forced: dict[int, list[int]] = {}
        self._told: dict[int, list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._guides)

    def __contains__(self, row: int) -> bool:
        return row in self._guides

    def move_in(self, row: int, guide: Guide | None) -> None:
        """A request takes the row."""
        if guide is not None:
            self._guides[row] = guide
            self._look(row, [])

    def move_out(self, row: int) -> None:
        """It leaves."""
        for of in (self._guides, self._forced, self._told):
            of.pop(row, None)

    def forced(self, row: int) -> list[int] | None:
        """Tokens that must come next in the row; None: there is a choice, or no guide."""
        return self._forced.get(row)

    def accept(self, row: int, token_ids: Sequence[int], drafts: Sequence[int]) -> None:
        """The row has come so far; `drafts` are what the runner will have verified in its next step."""
        self._guides[row].accept(token_ids)
        self._look(row, drafts)

    def masked(self, plan: StepPlan) -> Int32:
        """Indexes of the plan's rows that sample under a mask."""
        return np.array([at for at, row in enumerate(ints(plan.rows)) if plan.samples[at] and row in self._guides], np.int32)

    def inputs(self, plan: StepPlan, masked: Int32, live: Bool) -> SampleInputs:
        """Masks for the `masked` rows of a plan whose requests are still there. All steps before it have been taken in."""
        at = masked[live[masked]]
        if not len(at):
            return SampleInputs(plan.step_id)
        given, begins = plan.draft_ids, np.zeros(len(plan.rows), np.int32)
        counts = plan.num_drafts if len(plan.num_drafts) else np.zeros(len(plan.rows), np.int32)
        lengths = counts[plan.draft_rows]
        begins[plan.draft_rows] = np.cumsum(lengths) - lengths
        with_plan = set(ints(plan.draft_rows))
        words = next(iter(self._guides.values())).num_words
        bitmask = np.full((int((counts[at] + 1).sum()), words), _ALL, np.int32)
        first = 0
        for index in ints(at):
            row, count = int(plan.rows[index]), int(counts[index])
            drafts = ints(given[begins[index] : begins[index] + count]) if index in with_plan else self._told[row][:count]
            # Where the runner has fewer drafts than planned, what it fills up with is never accepted.
            self._guides[row].fill(bitmask[first : first + 1 + len(drafts)], drafts)
            first += 1 + count
        return SampleInputs(plan.step_id, at, bitmask)

    def _look(self, row: int, drafts: Sequence[int]) -> None:
        self._told[row] = list(drafts)
        if forced := list(self._guides[row].forced()):
            self._forced[row] = forced
        else:
            self._forced.pop(row, None)


def told_drafts(drafts: Int32 | None, at: int) -> list[int]:
    """What a result says of the drafts of one of its rows."""
    return [] if drafts is None else ints(drafts[at][drafts[at] >= 0])
