"""The drafts that a runner keeps: what it does not tell of, it does not have verified."""

import numpy as np

from penstock.engine.config import SpeculativeConfig
from penstock.engine.core.plan import Admission, StepPlan, empty
from penstock.engine.core.row_table import RowTable
from penstock.engine.runner.input_batch import Placed
from penstock.engine.runner.own_drafts import Clock, OwnDrafts
from penstock.engine.sampling import SamplingParams
from penstock.engine.spec.costs import Timing
from penstock.engine.spec.filling import to_few_sizes, to_whole_rows, unfilled
from penstock.engine.spec.proposer import Proposer

K, VOCAB = 4, 100
FREE = [Timing(1, 0, 1e9), Timing(1, K, 1e9)]
DEAR = [Timing(1, 0, 1e-9), Timing(1, K, 1e9)]


STOPPED = Clock(lambda: 0.0, lambda value: value)
ONE = np.ones(1, np.int32)
GOES_ON = StepPlan(1, empty(), [], [], [], np.zeros(1, np.int32), ONE, np.ones(1, np.bool_))
"""A step of row 0 with one token."""


class Sevens(Proposer):
    """Always has as many drafts as there may be."""

    def propose(self, table, rows, known, most):
        return np.full((len(rows), K), 7, np.int32)


def a_read_step() -> Placed:
    """Nothing that these proposers look at."""
    nothing = empty()
    return Placed(nothing, nothing, nothing, nothing, nothing, [], None)


def a_step(own: OwnDrafts, rows: RowTable, before: int):
    """Of one row with three tokens, whose drafts were `before`; what the runner tells of its next ones."""
    sampling = SamplingParams(max_tokens=9, temperature=0.0)
    admission = Admission(0, np.array([1, 2, 3], np.int32), 3, 0, sampling)
    plan = StepPlan(0, empty(), [admission], [empty()], [empty()], empty(1), np.array([3], np.int32), np.ones(1, np.bool_))
    plan.rows[0] = 0
    own.apply(plan, rows)
    rows.apply(plan)
    own.drafts[0], own._has_any = before, True
    return own.propose(plan, a_read_step(), np.ones(1, np.int32), rows)


def owner(timings) -> OwnDrafts:
    return with_proposer(Sevens(), timings)


def test_what_pays_is_told_and_kept():
    own = owner(FREE)
    assert a_step(own, RowTable(1, 32, [4]), -1).tolist() == [[7] * K]
    assert own.drafts.tolist() == [[7] * K]


def test_what_does_not_pay_is_neither_told_nor_kept():
    own = owner(DEAR)
    assert a_step(own, RowTable(1, 32, [4]), 5) is None
    assert own.drafts.tolist() == [[-1] * K]


class Scripted(Sevens):
    """Says what it is given to say, counts its calls, and may fail while it follows."""

    def __init__(self, drafts: list[int], fails: bool = False) -> None:
        self.drafts, self.fails = drafts, fails
        self.followed = self.proposed = self.skips = 0

    def follow(self, table, rows, step, asked):
        self.followed += 1
        if self.fails:
            raise RuntimeError("the drafter is gone")

    def skipped(self, table, rows):
        self.skips += 1

    def propose(self, table, rows, known, most):
        self.proposed += 1
        return np.array([self.drafts] * len(rows), np.int32)


def with_proposer(proposer: Proposer, timings=FREE) -> OwnDrafts:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=K)
    return OwnDrafts(config, proposer, timings, 1, VOCAB, STOPPED)


def test_where_no_draft_pays_the_proposer_follows_and_is_not_asked():
    proposer = Scripted([7] * K)
    assert a_step(with_proposer(proposer, DEAR), RowTable(1, 32, [4]), -1) is None
    assert (proposer.followed, proposer.proposed) == (1, 0)


def test_a_proposer_that_fails_while_it_follows_costs_the_drafts_and_nothing_else(caplog):
    proposer = Scripted([7] * K, fails=True)
    own = with_proposer(proposer)
    assert a_step(own, RowTable(1, 32, [4]), 5) is None
    assert own.drafts.tolist() == [[-1] * K] and proposer.proposed == 0
    assert "no drafts: the proposer failed" in caplog.text


def test_drafts_end_before_the_first_id_outside_the_vocabulary():
    for outside in (VOCAB, -3):
        own = with_proposer(Scripted([7, outside, 8, 9]))
        told = a_step(own, RowTable(1, 32, [4]), -1)
        assert told is not None and told[0, 0] == 7
        assert not np.isin(told, [outside, 8, 9]).any()


def test_a_proposer_is_not_told_of_a_long_rest_and_begins_anew_with_the_next_request():
    proposer, rows = Scripted([7] * K), RowTable(1, 1000, [4])
    own = with_proposer(proposer, DEAR)
    a_step(own, rows, -1)
    followed = []
    for _ in range(100):
        own.propose(GOES_ON, a_read_step(), ONE, rows)
        followed.append(proposer.followed)
    reads = sum((1, 1 + 1, 1 + 2, 1 + 4, 1 + 8, 1 + 16))
    assert followed[-1] == reads, "it reads on until a rest is long, and what it has missed it never reads"
    assert proposer.skips == 0, "what it has missed is of interest once it reads again"
    while own._depth.rests(1):
        pass
    a_step(own, RowTable(1, 32, [4]), -1)
    assert (proposer.followed, proposer.skips) == (reads + 1, 1)


class Slow(Sevens):
    """Takes its time, which a clock shows."""

    def __init__(self) -> None:
        self.now = 0.0

    def propose(self, table, rows, known, most):
        self.now += 2.0
        return super().propose(table, rows, known, most)


def test_a_step_costs_what_it_took_and_the_guess_that_it_verifies():
    """A guess that came with a prompt had the prompt to read as well: nothing is learned from the step that verifies it."""
    proposer, rows, seen = Slow(), RowTable(1, 1000, [4]), []
    clock = Clock(lambda: proposer.now, lambda value: value)
    own = OwnDrafts(SpeculativeConfig(method="draft_model", num_speculative_tokens=K), proposer, FREE, 1, VOCAB, clock)
    own._depth.observe_step = lambda *given: seen.append(given)
    a_step(own, rows, -1)
    drafts = np.array([K], np.int32)
    verifies = StepPlan(1, empty(), [], [], [], np.zeros(1, np.int32), 1 + drafts, np.ones(1, np.bool_), num_drafts=drafts)
    for took in (10.0, 20.0, 30.0):
        own.apply(verifies, rows)
        proposer.now += took
        own.propose(verifies, a_read_step(), 1 + drafts, rows)
    own.apply(GOES_ON, rows)
    assert seen == [(1, K, 20.0 + 2.0), (1, K, 30.0 + 2.0)]


def test_a_request_at_its_end_has_no_use_for_more_drafts_than_tokens():
    """It may end with 12 tokens."""
    config, rows = SpeculativeConfig(method="ngram", num_speculative_tokens=K), RowTable(1, 32, [4])
    own = OwnDrafts(config, Sevens(), FREE, 1, VOCAB, STOPPED, fill=to_few_sizes(64))
    a_step(own, rows, -1)
    found = {}
    for known in (6, 8, 9, 10, 11):
        rows.num_tokens[0] = known
        told = own.propose(GOES_ON, a_read_step(), ONE, rows)
        found[known] = 0 if told is None else int((told >= 0).sum())
    assert found == {6: 4, 8: 3, 9: 2, 10: 1, 11: 0}


class Unequal(Proposer):
    """Has 3, 1 and 0 drafts of three rows."""

    looks_up = True

    def propose(self, table, rows, known, most):
        drafts = np.full((len(rows), K), -1, np.int32)
        drafts[0, :3], drafts[1, 0] = 7, 8
        return drafts


def test_a_step_is_filled_up_with_guesses_that_are_not_the_proposers():
    """Of nine rows two have drafts: 13 tokens. There are tapes of 14, and a device has a graph of five each. A guess is the last
    token again, which is 0 here."""
    config, count = SpeculativeConfig(method="suffix", num_speculative_tokens=K), 9
    none, few = [-1] * K, [7, 7, 7, -1]
    for fill, expected in (
        (unfilled, [few, [8, -1, -1, -1], none]),
        (to_few_sizes(64), [[7, 7, 7, 0], [8, -1, -1, -1], none]),
        (to_whole_rows(K, 45), [[7, 7, 7, 0], [8, 0, 0, 0], [0] * K]),
        (to_whole_rows(K, 44), [few, [8, -1, -1, -1], none]),
    ):
        own, table = OwnDrafts(config, Unequal(), FREE, count, VOCAB, STOPPED, fill=fill), RowTable(count, 32, [4])
        sampling, rows = SamplingParams(max_tokens=9, temperature=0.0), np.arange(count, dtype=np.int32)
        admissions = [Admission(row, np.array([1], np.int32), 1, 0, sampling) for row in range(count)]
        ones = np.ones(count, np.int32)
        plan = StepPlan(0, empty(), admissions, [empty()], [empty()], rows, ones, np.ones(count, np.bool_))
        own.apply(plan, table)
        table.apply(plan)
        told = own.propose(plan, a_read_step(), ones, table)
        assert told is not None and told.tolist() == [*expected, *[expected[-1]] * 6]
        assert own._num_proposed[:2].tolist() == [3, 1]
