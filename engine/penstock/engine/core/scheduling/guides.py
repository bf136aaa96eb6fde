"""Guides say which tokens may come next in a request: a grammar's state, for one.

A guide knows accepted tokens alone, so that its mask for a step is there only when the step before has been taken in. Where it
leaves no choice it forces tokens, which are verified as drafts in one step; such a row is in one plan at a time.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from penstock.engine.core.plan import NONE, Bool, Int32, Int64, SampleInputs, StepPlan, ints

MAX_FORCED_TOKENS = 16
"""Most forced tokens of a row in a step: each takes a row of logits, for which a runner must have memory."""
_ALL = -1
"""A word with all bits set."""
_MAX_GROUPS = 8
"""Groups of rows that are kept: steps with forced tokens ask others than steps without."""


def most_forced(max_num_seqs: int) -> int:
    """Forced tokens of a step at most. Each is one more row of logits, and rows of logits take much of a device's memory."""
    return max(max_num_seqs, MAX_FORCED_TOKENS)


class GuideBatch(Protocol):
    """Guides that are asked all at once, which costs less than to ask one after the other."""

    def fill(self, masks: Int32) -> None:
        """Writes the masks of steps without drafts, [m, words], whole; the guides stay where they are."""
        ...

    def take(self, token_ids: Sequence[int]) -> list[int]:
        """Advances each by a token, [m]. Returns which of the requests end with it, for whatever reason."""
        ...

    def forced(self) -> list[Sequence[int]]:
        """The tokens that must come next of each, as far as there is no choice, [m]."""
        ...


class Batcher(Protocol):
    """Makes batches of guides; it is the same object for all that can be in one batch."""

    def batch(self, guides: Sequence[Any]) -> GuideBatch:
        """A batch of guides whose `batcher` this is, [m]."""
        ...


class Guide(Protocol):
    """Guides the output of one request."""

    @property
    def batcher(self) -> Batcher | None:
        """Asks this guide together with others; None: it has to be asked itself, for now."""
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


class _Group:
    """Guides of some rows, in batches as far as they can be. Batches may be of fewer guides than could be in them by now."""

    def __init__(self, guides: Sequence[Guide]) -> None:
        self.guides = guides
        by: dict[Batcher | None, list[int]] = {}
        for at, guide in enumerate(guides):
            by.setdefault(guide.batcher, []).append(at)
        self.alone = by.pop(None, [])
        """Which of them are in no batch."""
        self._batches = [(batcher.batch([guides[at] for at in of]), of) for batcher, of in by.items() if batcher is not None]
        self._whole = self._batches[0][0] if len(self._batches) == 1 and not self.alone else None
        """The batch that has all of them, which is the usual case."""

    def masks(self, num_words: int) -> Int32:
        """The masks of steps without drafts, [m, words]."""
        masks = np.empty((len(self.guides), num_words), np.int32)
        if self._whole is not None:
            self._whole.fill(masks)
            return masks
        masks.fill(_ALL)
        for batch, of in self._batches:
            part = masks[of]
            batch.fill(part)
            masks[of] = part
        for at in self.alone:
            self.guides[at].fill(masks[at : at + 1], ())
        return masks

    def take(self, token_ids: Sequence[int]) -> list[int]:
        """Advances each by a token; returns which of the requests end."""
        if self._whole is not None:
            return self._whole.take(token_ids)
        ends = [at for at in self.alone if self.guides[at].take(token_ids[at])]
        for batch, of in self._batches:
            ends += [of[at] for at in batch.take([token_ids[at] for at in of])]
        return ends

    def forced(self) -> list[Sequence[int]]:
        """What must come next of each."""
        if self._whole is not None:
            return self._whole.forced()
        found: list[Sequence[int]] = [()] * len(self.guides)
        for at in self.alone:
            found[at] = self.guides[at].forced()
        for batch, of in self._batches:
            for at, forced in zip(of, batch.forced(), strict=True):
                found[at] = forced
        return found


class Guides:
    """The guides of all rows that have one.

    Args:
        max_num_seqs: Rows.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._guides: dict[int, Guide] = {}
        self._guided: Bool = np.zeros(max_num_seqs, np.bool_)
        """[rows]: whether the row has a guide."""
        self._groups: dict[tuple[int, ...], _Group] = {}
        """By rows, of those that have been asked since a request came or left: mostly it is the same ones again."""
        self.forced: dict[int, list[int]] = {}
        """Tokens that must come next, by row, where there is no choice."""
        self._told: dict[int, Sequence[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._guides)

    def move_in(self, row: int, guide: Guide | None) -> None:
        """A request takes the row."""
        if guide is not None:
            self._guides[row], self._guided[row] = guide, True
            self._groups.clear()
            self._force(row, guide.forced())

    def move_out(self, row: int) -> None:
        """Remove the row's guide: its request leaves."""
        if self._guides.pop(row, None) is None:
            return
        self._guided[row] = False
        self._groups.clear()
        for of in (self.forced, self._told):
            of.pop(row, None)

    def advance(self, rows: Int64, token_ids: Int32, stopped: Bool) -> dict[int, str | None]:
        """Has the rows' guides take in their next tokens, but for those that stop their requests: [m] each.

        Returns:
            Which of the m end their requests with these tokens, and the error of each, if any.
        """
        at = (self._guided[rows] > stopped).nonzero()[0]
        group = self._group(rows[at])
        return {int(at[index]): group.guides[index].error for index in group.take(ints(token_ids[at]))}

    def advance_whole(self, rows: Int64, token_ids: Int32, counts: Int32) -> dict[int, tuple[int, str | None]]:
        """Has the rows' guides take in all their next tokens, none of which stops a request by itself.

        Args:
            rows: [m].
            token_ids: [m, w].
            counts: [m]: how many of the tokens count, at least 1 each.

        Returns:
            Which of the m end their requests, with which of their tokens, counted from 1, and the error of each, if any.
        """
        # Of all rows, as in steps without drafts: a group of those with one token would be another one in nearly every step.
        ends = {at: (1, error) for at, error in self.advance(rows, token_ids[:, 0], np.zeros(len(rows), np.bool_)).items()}
        for at in ints((self._guided[rows] & (counts > 1)).nonzero()[0]):
            if at in ends:
                continue
            guide = self._guides[int(rows[at])]
            for count, token in enumerate(ints(token_ids[at, 1 : counts[at]]), 2):
                if guide.take(token):
                    ends[at] = count, guide.error
                    break
        return ends

    def is_open(self, row: int) -> bool:
        """Whether the row has a guide by which its output would be cut short if it ended here."""
        return row in self._guides and self._guides[row].is_open

    def look_on(self, rows: Int64, drafts: Int32 | None) -> None:
        """All these rows go on, [m]; `drafts`, [m, K], are what the runner will have verified, -1 pads; None: nothing."""
        guided = self._guided[rows]
        rows = rows[guided]
        if drafts is not None or self._told:
            for at, row in zip(ints(guided.nonzero()[0]), ints(rows), strict=True):
                told = told_drafts(drafts, at)
                if told or row in self._told:
                    self._told[row] = told
        found = self._group(rows).forced()
        if self.forced or any(found):
            for row, forced in zip(ints(rows), found, strict=True):
                self._force(row, forced)

    def _force(self, row: int, forced: Sequence[int]) -> None:
        if forced:
            self.forced[row] = list(forced[:MAX_FORCED_TOKENS])
        else:
            self.forced.pop(row, None)

    def _group(self, rows: Int64 | Int32) -> _Group:
        """The guides of these rows, each of which has one."""
        key = tuple(ints(rows))
        group = self._groups.get(key)
        if group is None or (group.alone and any(group.guides[at].batcher for at in group.alone)):
            if len(self._groups) == _MAX_GROUPS:
                self._groups.clear()
            group = self._groups[key] = _Group([self._guides[row] for row in key])
        return group

    def masked(self, plan: StepPlan) -> Int32:
        """Indexes of the plan's rows that sample under a mask."""
        return (self._guided[plan.rows] & plan.samples).nonzero()[0].astype(np.int32)

    def inputs(self, plan: StepPlan, masked: Int32, live: Bool) -> SampleInputs:
        """Masks for the `masked` rows of a plan whose requests are still there. All steps before it have been taken in."""
        at = masked[live[masked]]
        if not len(at):
            return SampleInputs(plan.step_id)
        group = self._group(plan.rows[at])
        masks = group.masks(next(iter(self._guides.values())).num_words)
        counts = plan.num_drafts[at] if len(plan.num_drafts) else NONE
        if not np.count_nonzero(counts):
            return SampleInputs(plan.step_id, at, masks)
        bitmask, begin, with_plan = masks.repeat(counts + 1, axis=0), 0, dict[int, list[int]]()
        given = ints(plan.draft_ids)
        for of, count in zip(ints(plan.draft_rows), ints(plan.num_drafts[plan.draft_rows]), strict=True):
            with_plan[of], begin = given[begin : begin + count], begin + count
        with_drafts = counts.nonzero()[0]
        firsts = with_drafts + (np.cumsum(counts) - counts)[with_drafts]
        for index, first, count in zip(ints(with_drafts), ints(firsts), ints(counts[with_drafts]), strict=True):
            bitmask[first : first + 1 + count] = _ALL
            drafts = with_plan.get(of := int(at[index]))
            if drafts is None:
                # Where the runner has fewer drafts than planned, what it fills up with is never accepted.
                drafts = self._told.get(int(plan.rows[of]), ())[:count]
            group.guides[index].fill(bitmask[first : first + 1 + len(drafts)], drafts)
        return SampleInputs(plan.step_id, at, bitmask)


def told_drafts(drafts: Int32 | None, at: int) -> list[int]:
    """What a result says of the drafts of one of its rows."""
    return [] if drafts is None else ints(drafts[at][drafts[at] >= 0])
