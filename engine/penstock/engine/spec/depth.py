"""How many drafts pay: verifying one costs a part of a step, and gains a token only where it and all before it are accepted."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.engine.core.plan import Int32

Float64 = npt.NDArray[np.float64]

_PRIOR: Final = 0.7
"""Acceptance that a new request is believed to have: a first draft is nearly always worth a try."""
_WEIGHT: Final = 0.15
"""Of a draft in a row's acceptance."""
_RETURN: Final = 0.02
"""How far acceptance goes back to the prior in a step without drafts, so that a row tries again after a while."""


class DraftDepth:
    """Chooses the number of drafts by row.

    Args:
        max_num_seqs: Rows.
        num_drafts: K, drafts of a row at most.
        costs: By number of rows, ascending: what one draft for every row adds to a step without drafts, as a share of it.
    """

    def __init__(self, max_num_seqs: int, num_drafts: int, costs: Sequence[tuple[int, float]]) -> None:
        self._acceptance: Float64 = np.full(max_num_seqs, _PRIOR)
        self._sizes, self._costs = (np.array(values, np.float64) for values in zip(*costs, strict=True))
        self._counts = np.arange(num_drafts + 1)

    def admit(self, row: int) -> None:
        """Another request has the row."""
        self._acceptance[row] = _PRIOR

    def observe(self, rows: Int32, drafted: Int32, accepted: Int32) -> None:
        """Takes in a step: [m] rows, the drafts that were verified, and how many of them were accepted."""
        # A draft after a rejected one says nothing.
        judged = np.minimum(accepted + 1, drafted)
        old = self._acceptance[rows]
        kept = (1 - _WEIGHT) ** judged
        seen = np.divide(accepted, judged, out=np.zeros(len(rows)), where=judged > 0)
        self._acceptance[rows] = np.where(drafted > 0, kept * old + (1 - kept) * seen, old + _RETURN * (_PRIOR - old))

    def choose(self, rows: Int32) -> Int32:
        """How many drafts, [m], of a step's rows make the most tokens in a given time."""
        acceptance = np.minimum(self._acceptance[rows], 0.99)[:, None]
        cost = np.interp(len(rows), self._sizes, self._costs)
        tokens = (1 - acceptance ** (self._counts + 1)) / (1 - acceptance)
        return np.argmax(tokens / (1 + cost * self._counts), axis=1).astype(np.int32)
