"""Guides say which tokens may come next in a request: a grammar's state, for one.

A guide knows accepted tokens alone, so that its mask for a step is there only when the step before has been taken in. Where it
leaves no choice it forces tokens, which are verified as drafts in one step; such a row is in one plan at a time.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from penstock.engine.core.plan import Bool, Int32, SampleInputs, StepPlan, ints

MAX_FORCED_TOKENS = 16
"""Most forced tokens of a row in a step: each takes a row of logits, for which a runner must have memory."""
_ALL = -1
"""A word with all bits set."""


def most_forced(max_num_seqs: int) -> int:
    """Forced tokens of a step at most. Each is one more row of logits, and rows of logits take much of a device's memory."""
    return max(max_num_seqs, MAX_FORCED_TOKENS)


class Filler(Protocol):
    """Fills the masks of many guides in one call, which costs less than to ask one after the other."""

    def fill(self, guides: Sequence[Any], masks: Int32, places: Sequence[int]) -> None:
        """Writes the masks of steps without drafts; the guides stay where they are.

        Args:
            guides: Whose `filler` it is.
            masks: [m, words]; those of the places are written whole.
            places: Which of the m is for which guide.
        """
        ...


class Guide(Protocol):
    """Guides the output of one request."""

    @property
    def filler(self) -> Filler | None:
        """Fills the mask of the next token together with those of others; None: only `fill` can."""
        ...

    @property
    def num_words(self) -> int:
        """Words of a mask, the same for all guides of an engine."""
        ...

    @property
    def ended(self) -> bool:
        """Whether the output is complete and nothing can follow: the request ends."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether the output would be cut short if it ended here."""
        ...

    @property
    def error(self) -> str | None:
        """Why the request fails; None: it goes on."""
        ...

    def forced(self) -> Sequence[int]:
        """The tokens that must come next, as far as there is no choice."""
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advances: these tokens are the request's now."""
        ...

    def take(self, token_id: int) -> bool:
        """`accept` of one token; returns whether the request ends with it, for whatever reason."""
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
    """The guides of all rows that have one."""

    def __init__(self) -> None:
        self._guides: dict[int, Guide] = {}
        self.forced: dict[int, list[int]] = {}
        """Tokens that must come next, by row, where there is no choice."""
        self._told: dict[int, Sequence[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._guides)

    def move_in(self, row: int, guide: Guide | None) -> None:
        """A request takes the row."""
        if guide is not None:
            self._guides[row] = guide
            self.look(row, [])

    def move_out(self, row: int) -> None:
        """Remove the row's guide: its request leaves."""
        for of in (self._guides, self.forced, self._told):
            of.pop(row, None)

    def advance(self, rows: Sequence[int], token_ids: Sequence[int], stopped: Sequence[bool]) -> dict[int, str | None]:
        """Has the rows' guides take in their next tokens, but for those that stop their requests: [m] each.

        Returns:
            Which of the m end their requests with these tokens, and the error of each, if any.
        """
        found: dict[int, str | None] = {}
        for at, (row, token, stops) in enumerate(zip(rows, token_ids, stopped, strict=True)):
            if not stops and (guide := self._guides.get(row)) is not None and guide.take(token):
                found[at] = guide.error
        return found

    def is_open(self, row: int) -> bool:
        """Whether the row has a guide by which its output would be cut short if it ended here."""
        return row in self._guides and self._guides[row].is_open

    def look(self, row: int, drafts: Sequence[int]) -> None:
        """The row goes on; `drafts` are what the runner will have verified in its next step."""
        if drafts or row in self._told:
            self._told[row] = drafts
        if forced := self._guides[row].forced():
            self.forced[row] = list(forced[:MAX_FORCED_TOKENS])
        elif row in self.forced:
            del self.forced[row]

    def look_on(self, rows: Sequence[int], drafts: Int32 | None) -> None:
        """All these rows go on, [m]; `drafts`, [m, K], are what the runner will have verified, -1 pads; None: nothing."""
        for at, row in enumerate(rows):
            guide = self._guides.get(row)
            if guide is None:
                continue
            if drafts is not None or row in self._told or row in self.forced:
                self.look(row, told_drafts(drafts, at))
            elif forced := guide.forced():
                self.forced[row] = list(forced[:MAX_FORCED_TOKENS])

    def masked(self, plan: StepPlan) -> Int32:
        """Indexes of the plan's rows that sample under a mask."""
        guides, samples = self._guides, plan.samples.tolist()
        return np.array([at for at, row in enumerate(ints(plan.rows)) if samples[at] and row in guides], np.int32)

    def inputs(self, plan: StepPlan, masked: Int32, live: Bool) -> SampleInputs:
        """Masks for the `masked` rows of a plan whose requests are still there. All steps before it have been taken in."""
        at = masked[live[masked]]
        if not len(at):
            return SampleInputs(plan.step_id)
        words = next(iter(self._guides.values())).num_words
        if not len(plan.num_drafts):
            # Most steps of most batches: what is done for each row here, it does for each token.
            guides = [self._guides[row] for row in ints(plan.rows[at])]
            if (filler := guides[0].filler) is not None and len({guide.filler for guide in guides}) == 1:
                bitmask = np.empty((len(guides), words), np.int32)
                filler.fill(guides, bitmask, range(len(guides)))
                return SampleInputs(plan.step_id, at, bitmask)
        begins = np.zeros(len(plan.rows), np.int32)
        counts = plan.num_drafts if len(plan.num_drafts) else begins
        lengths = counts[plan.draft_rows]
        begins[plan.draft_rows] = np.cumsum(lengths) - lengths
        given, with_plan = ints(plan.draft_ids), set(ints(plan.draft_rows))
        bitmask = np.full((int((counts[at] + 1).sum()), words), _ALL, np.int32)
        first, together = 0, dict[Filler, tuple[list[Guide], list[int]]]()
        for index, row, count, begin in zip(ints(at), ints(plan.rows[at]), ints(counts[at]), ints(begins[at]), strict=True):
            guide = self._guides[row]
            if not count and (filler := guide.filler) is not None:
                guides, places = together.setdefault(filler, ([], []))
                guides.append(guide)
                places.append(first)
            else:
                drafts = given[begin : begin + count] if index in with_plan else self._told.get(row, ())[:count]
                # Where the runner has fewer drafts than planned, what it fills up with is never accepted.
                guide.fill(bitmask[first : first + 1 + len(drafts)], drafts)
            first += 1 + count
        for filler, (guides, places) in together.items():
            filler.fill(guides, bitmask, places)
        return SampleInputs(plan.step_id, at, bitmask)


def told_drafts(drafts: Int32 | None, at: int) -> list[int]:
    """What a result says of the drafts of one of its rows."""
    return [] if drafts is None else ints(drafts[at][drafts[at] >= 0])
