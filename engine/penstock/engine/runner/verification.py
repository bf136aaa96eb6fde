"""Which drafts a step accepts: those that equal the tokens chosen in their places, from the left up to the first that does not.

A token is chosen at every position with the request's own random number of that position, as if there were no drafts. So a
stream does not depend on its drafts, whether greedy or sampled (Leviathan et al., arXiv 2211.17192, where a draft's distribution
is a single token). In the place of a draft that was drawn, the sampler chooses the draft where it accepts it and another token
where it does not (`rejection.settle`): here both kinds are alike.
"""

from typing import NamedTuple

import numpy as np

from penstock.engine.core.plan import Bool, Int32, StepPlan
from penstock.kernels.sampling.buffers import Column

_NEVER = -1
"""A draft that equals no token."""


class Verified(NamedTuple):
    """Of a step of r rows, K drafts of a row at most and m rows of logits."""

    token_ids: Int32
    """[r, 1 + K]: the drafts accepted and the token after them; -1 pads."""
    counts: Int32
    """[r]: how many these are; 0 where the row does not sample."""
    kept: Bool
    """[m]: whether the row of logits has given one of them."""
    judged: Int32
    """[r, RESULT]: the sampler's verdict on each row, from its rows of logits that are kept; its tokens are those above."""


def planned_drafts(plan: StepPlan, own: Int32 | None) -> Int32:
    """The drafts of a plan's rows.

    Args:
        plan: With drafts.
        own: [rows, K]: the runner's, by request row, -1 pads; None: it has none.

    Returns:
        [r, most of a row]: -1 pads, also where the runner has fewer than planned.
    """
    drafts = np.full((len(plan.rows), max(plan.num_drafts.tolist(), default=0)), _NEVER, np.int32)
    if own is not None:
        width = min(own.shape[1], drafts.shape[1])
        drafts[:, :width] = own[plan.rows, :width]
    if len(plan.draft_rows):
        drafts[plan.draft_rows] = _NEVER
        lengths = plan.num_drafts[plan.draft_rows]
        owners = plan.draft_rows.repeat(lengths)
        places = np.arange(len(owners)) - (lengths.cumsum() - lengths).repeat(lengths)
        drafts[owners, places] = plan.draft_ids
    drafts[np.arange(drafts.shape[1]) >= plan.num_drafts[:, None]] = _NEVER
    return drafts


def choices(plan: StepPlan) -> tuple[Int32, Int32]:
    """The tokens that a step chooses, [m], row by row and from the left: those in place of drafts, and one after them.

    Args:
        plan: With drafts.

    Returns:
        [m] each: index into the plan's rows, and how many of that row's choices are still to come.
    """
    sampled = plan.samples.nonzero()[0].astype(np.int32)
    each = 1 + plan.num_drafts[sampled]
    which = sampled.repeat(each)
    back = each.cumsum().repeat(each) - np.arange(1, 1 + len(which))
    return which, back.astype(np.int32)


def choices_given(plan: StepPlan, width: int) -> Bool:
    """[r, 1 + width]: which rows of a step choose a token in which place. Row by row these are the step's rows of logits."""
    return plan.samples[:, None] & (np.arange(width + 1) <= plan.num_drafts[:, None])


def verify(plan: StepPlan, drafts: Int32, sampled: Int32) -> Verified:
    """Compares drafts with what was chosen.

    Args:
        plan: With drafts.
        drafts: [r, K]: as of `planned_drafts`.
        sampled: [m, RESULT]: of each row that samples 1 + `num_drafts`, one row after the other.
    """
    rows, width = len(plan.rows), drafts.shape[1]
    chosen, given = np.full((rows, width + 1), _NEVER, np.int32), choices_given(plan, width)
    chosen[given] = sampled[:, Column.TOKEN]
    differs = np.ones((rows, width + 1), np.bool_)
    differs[:, :width] = (chosen[:, :width] != drafts) | (drafts == _NEVER)
    counts = (differs.argmax(axis=1) + 1) * plan.samples
    kept = np.arange(width + 1) < counts[:, None]
    judged = np.zeros((rows, sampled.shape[1]), np.int32)
    if np.count_nonzero(sampled[:, Column.NANS :]):
        verdicts = np.zeros((rows, width + 1, sampled.shape[1]), np.int32)
        verdicts[given] = sampled
        verdicts[~kept] = 0
        judged = verdicts.max(axis=1)
    return Verified(np.where(kept, chosen, np.int32(_NEVER)), counts.astype(np.int32), kept[given], judged)
