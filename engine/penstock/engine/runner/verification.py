"""Which drafts a step accepts: those that equal the tokens chosen in their places, from the left up to the first that does not.

A token is chosen at every position with the request's own random number of that position, as if there were no drafts. So a
stream does not depend on its drafts, whether greedy or sampled (Leviathan et al., arXiv 2211.17192, where a draft's distribution
is a single token). In the place of a draft that was drawn, the sampler chooses the draft where it accepts it and another token
where it does not (`rejection.settle`): here both kinds are alike.
"""

from typing import NamedTuple

import numpy as np

from penstock.engine.core.plan import Bool, Int32, Int64, StepPlan
from penstock.engine.core.row_table import first_places
from penstock.engine.runner.sampler.row_lists import spread
from penstock.kernels.sampling.buffers import Column

_NEVER = -1
"""A draft that equals no token."""


class PlannedDrafts(NamedTuple):
    """Of a step of r rows, K drafts of a row at most and m choices. A row chooses a token in place of each draft and one after
    them; the choices are counted row by row and from the left."""

    ids: Int32
    """[r, 1 + K]: the drafts, then -1."""
    given: Bool
    """[r, 1 + K]: which rows choose a token in which place."""
    of: Int64
    """[m]: index into the plan's rows."""
    place: Int64
    """[m]: how many of that row's choices come before."""
    back: Int32
    """[m]: how many come after."""


class Verified(NamedTuple):
    """Of such a step."""

    token_ids: Int32
    """[r, 1 + K]: the drafts accepted and the token after them; -1 pads."""
    counts: Int32
    """[r]: how many these are; 0 where the row does not sample."""
    accepted: Bool
    """[r, 1 + K]: which places these are."""
    given: Bool
    """[r, 1 + K]: as of `PlannedDrafts`."""
    judged: Int32
    """[r, RESULT]: the sampler's verdict on each row, from its rows of logits that are kept; its tokens are those above."""

    @property
    def kept(self) -> Bool:
        """[m]: whether the row of logits has given one of the tokens."""
        return self.accepted[self.given]


def planned_drafts(plan: StepPlan, own: Int32 | None) -> PlannedDrafts:
    """The drafts of a plan's rows.

    Args:
        plan: With drafts.
        own: [rows, K]: the runner's, by request row, -1 pads; None: it has none. It may have fewer than planned.
    """
    counts = plan.num_drafts
    width = max(counts.tolist(), default=0)
    ids, places = np.full((len(counts), width + 1), _NEVER, np.int32), np.arange(width + 1)
    if own is not None:
        has = min(own.shape[1], width)
        ids[:, :has] = own.take(plan.rows, axis=0)[:, :has]
    if len(plan.draft_rows):
        ids[plan.draft_rows] = _NEVER
        owners, at = spread(counts[plan.draft_rows])
        ids[plan.draft_rows[owners], at] = plan.draft_ids
    ends = counts[:, None]
    ids = np.where(places < ends, ids, np.int32(_NEVER))
    given = plan.samples[:, None] & (places <= ends)
    of, place = given.nonzero()
    return PlannedDrafts(ids, given, of, place, (counts[of] - place).astype(np.int32))


def verify(plan: StepPlan, drafts: PlannedDrafts, sampled: Int32) -> Verified:
    """Compares a plan's drafts with what was chosen.

    Args:
        plan: With drafts.
        drafts: Its.
        sampled: [m, RESULT].
    """
    ids, given = drafts.ids, drafts.given
    chosen = np.full(ids.shape, _NEVER, np.int32)
    chosen[given] = sampled[:, Column.TOKEN]
    counts = ((((chosen != ids) | (ids < 0)).argmax(axis=1) + 1) * plan.samples).astype(np.int32)
    accepted = first_places(ids.shape[1], counts)
    judged = np.zeros((len(ids), sampled.shape[1]), np.int32)
    if np.count_nonzero(sampled[:, Column.NANS :]):
        verdicts = np.zeros((*ids.shape, sampled.shape[1]), np.int32)
        verdicts[given] = sampled
        verdicts[~accepted] = 0
        judged = verdicts.max(axis=1)
    return Verified(np.where(accepted, chosen, np.int32(_NEVER)), counts, accepted, given, judged)
