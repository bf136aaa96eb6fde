"""The drafts that a runner keeps: what it does not tell of, it does not have verified."""

import numpy as np

from penstock.engine.config import SpeculativeConfig
from penstock.engine.core.plan import Admission, StepPlan, empty
from penstock.engine.core.row_table import RowTable
from penstock.engine.runner.own_drafts import OwnDrafts
from penstock.engine.sampling import SamplingParams
from penstock.engine.spec.depth import Timing
from penstock.engine.spec.proposer import Proposer

K, VOCAB = 4, 100
FREE = [Timing(1, 0, 1e9), Timing(1, K, 1e9)]
DEAR = [Timing(1, 0, 1e-9), Timing(1, K, 1e9)]


class Sevens(Proposer):
    """Always has as many drafts as there may be."""

    def propose(self, table, rows, most):
        return np.full((len(rows), K), 7, np.int32)


def a_step(own: OwnDrafts, rows: RowTable, before: int):
    """Of one row with three tokens, whose drafts were `before`; what the runner tells of its next ones."""
    sampling = SamplingParams(max_tokens=9, temperature=0.0)
    admission = Admission(0, np.array([1, 2, 3], np.int32), 3, 0, sampling)
    plan = StepPlan(0, empty(), [admission], [empty()], [empty()], empty(1), np.array([3], np.int32), np.ones(1, np.bool_))
    plan.rows[0] = 0
    own.apply(plan, rows, 0.0)
    rows.apply(plan)
    own.drafts[0] = before
    return own.propose(plan, None, None, np.ones(1, np.bool_), rows)


def owner(timings) -> OwnDrafts:
    return OwnDrafts(SpeculativeConfig(method="ngram", num_speculative_tokens=K), Sevens(), timings, 1, VOCAB)


def test_what_pays_is_told_and_kept():
    own = owner(FREE)
    assert a_step(own, RowTable(1, 32, [4]), -1).tolist() == [[7] * K]
    assert own.drafts.tolist() == [[7] * K]


def test_what_does_not_pay_is_neither_told_nor_kept():
    own = owner(DEAR)
    assert a_step(own, RowTable(1, 32, [4]), 5) is None
    assert own.drafts.tolist() == [[-1] * K]
