"""The drafts that a runner keeps for its rows from one step to the next."""

import logging
from collections.abc import Callable, Sequence

import numpy as np

from penstock.engine.config import SpeculativeConfig
from penstock.engine.core.plan import Bool, Int32, StepPlan
from penstock.engine.core.row_table import RowTable
from penstock.engine.runner.verification import Verified
from penstock.engine.spec.depth import DraftDepth
from penstock.engine.spec.proposer import Proposer

log = logging.getLogger(__name__)

_PAD = -1
_REPEATS = 3
_PATIENCE_S = 0.5
"""A step that takes longer is the largest that is measured."""


class OwnDrafts:
    """Proposals, as many of them as pay.

    Args:
        config: The method and its limits.
        proposer: Whose drafts they are.
        costs: As `DraftDepth` takes them.
        max_num_seqs: Rows.
        vocab_size: A draft outside is none.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        proposer: Proposer,
        costs: Sequence[tuple[int, float]],
        max_num_seqs: int,
        vocab_size: int,
    ) -> None:
        self._proposer, self._vocab_size = proposer, vocab_size
        self._depth = DraftDepth(max_num_seqs, config.num_speculative_tokens, costs)
        self.drafts: Int32 = np.full((max_num_seqs, config.num_speculative_tokens), _PAD, np.int32)
        """[rows, K]: of each row's next step, -1 pads."""

    def apply(self, plan: StepPlan, rows: RowTable) -> None:
        """Takes in who leaves and who comes, before the plan is applied to the rows."""
        for row in plan.released.tolist():
            self._proposer.ended(rows.token_ids[row, rows.num_prompt_tokens[row] : rows.num_tokens[row]])
        for admission in plan.admissions:
            self._depth.admit(admission.row)
            self.drafts[admission.row] = _PAD

    def propose(self, plan: StepPlan, given: Int32 | None, verified: Verified | None, goes_on: Bool, rows: RowTable) -> Int32:
        """Makes the drafts of the next step, once the tokens of this one are in their rows.

        Args:
            plan: The step's.
            given: [r, K]: the drafts that it has verified; None: it had none.
            verified: What came of them.
            goes_on: [r]: which rows have a new token and no error.
            rows: With these tokens.

        Returns:
            [r, K]: -1 pads.
        """
        of = plan.rows[goes_on]
        if verified is not None and given is not None:
            self._depth.observe(of, (given >= 0).sum(axis=1, dtype=np.int32)[goes_on], verified.accepted[goes_on])
        else:
            self._depth.observe(of, np.zeros(len(of), np.int32), np.zeros(len(of), np.int32))
        self.drafts[plan.rows] = _PAD
        depths = self._depth.choose(of)
        wanted = of[depths > 0]
        if len(wanted):
            self.drafts[wanted] = self._checked(self._proposed(rows, wanted), depths[depths > 0])
        return self.drafts[plan.rows]

    def _proposed(self, rows: RowTable, wanted: Int32) -> Int32:
        """What the proposer says; a step does without drafts where it fails."""
        try:
            return self._proposer.propose(rows.token_ids, wanted, rows.num_tokens[wanted])
        except Exception:
            log.exception("no drafts: the proposer failed")
            return np.full((len(wanted), self.drafts.shape[1]), _PAD, np.int32)

    def _checked(self, drafts: Int32, depths: Int32) -> Int32:
        """Drafts up to the first that is no token, and no more than are wanted."""
        fits = (drafts >= 0) & (drafts < self._vocab_size) & (np.arange(drafts.shape[1]) < depths[:, None])
        return np.where(np.logical_and.accumulate(fits, axis=1), drafts, np.int32(_PAD))


def measure_costs(run: Callable[[int, int], float], max_num_seqs: int, num_drafts: int) -> list[tuple[int, float]]:
    """What one draft for every row adds to a step, by number of rows; see `DraftDepth`.

    Args:
        run: Runs a step of so many rows with so many drafts each; returns its seconds.
        max_num_seqs: Rows at most.
        num_drafts: Drafts at most.
    """
    sizes = sorted({min(size, max_num_seqs) for size in (1, 4, 16, 64)})
    found: list[tuple[int, float]] = []
    for size in sizes:
        for drafts in (0, num_drafts):  # the first runs of a shape do more than the later ones
            run(size, drafts)
            run(size, drafts)
        plain, verifying = (min(run(size, drafts) for _ in range(_REPEATS)) for drafts in (0, num_drafts))
        found.append((size, max(verifying / plain - 1, 0.0) / num_drafts))
        if verifying > _PATIENCE_S:
            break
    return found
