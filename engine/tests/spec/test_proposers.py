"""Proposers over rows, and how many drafts pay."""

import numpy as np
import pytest

from penstock.engine.config import SpeculativeConfig
from penstock.engine.core.row_table import RowTable
from penstock.engine.spec.depth import DraftDepth, Timing
from penstock.engine.spec.lookup import lookup_proposer


def proposed(proposer, tokens):
    table = RowTable(1, len(tokens), [16])
    table.token_ids[0], table.num_tokens[0] = tokens, len(tokens)
    (drafts,) = proposer.propose(table, np.zeros(1, np.int32), table.num_tokens, 8)
    return drafts.tolist()


@pytest.mark.req("SD-12")
def test_ngrams_of_the_lengths_that_were_asked_for():
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_min=2, prompt_lookup_max=3)
    proposer = lookup_proposer(config, None)
    assert proposed(proposer, [1, 2, 3, 4, 2, 3]) == [4, 2]
    assert proposed(proposer, [1, 3, 4, 2, 3]) == [-1, -1]


@pytest.mark.req("SD-14")
def test_repeated_outputs_make_longer_drafts():
    proposer = lookup_proposer(SpeculativeConfig(method="suffix", num_speculative_tokens=8), None)
    output = np.arange(10, 30, dtype=np.int32)
    assert proposed(proposer, [1, 10, 11, 12]) == [-1] * 8
    proposer.ended(output)
    assert proposed(proposer, [1, 10, 11, 12]) == [13, 14, 15, *[-1] * 5]
    assert proposed(proposer, [1, *range(10, 18)]) == list(range(18, 26))


def test_other_requests_can_be_left_out():
    config = SpeculativeConfig(method="suffix", num_speculative_tokens=2, suffix_decoding_max_cached_requests=0)
    proposer = lookup_proposer(config, None)
    proposer.ended(np.arange(10, 30, dtype=np.int32))
    assert proposed(proposer, [10, 11, 12, 13]) == [-1, -1]
    assert proposed(proposer, [5, 6, 7, 5, 6]) == [7, 5]


ROWS = np.arange(2, dtype=np.int32)
CHEAP = [Timing(1, 0, 1.0), Timing(1, 8, 1.4), Timing(64, 0, 2.0), Timing(64, 8, 30.0)]
"""Eight drafts cost little for a row, and far more than they can give for 64."""


def observed(depth, drafted, accepted, steps):
    for _ in range(steps):
        depth.observe(ROWS, np.array(drafted, np.int32), np.array(accepted, np.int32))


def counts(*each):
    return np.array(each, np.int32)


@pytest.mark.req("SD-29")
def test_accepted_drafts_make_longer_ones_and_rejected_ones_none():
    depth = DraftDepth(4, 8, CHEAP)
    assert depth.most(ROWS) > 0
    observed(depth, [4, 4], [4, 4], 12)
    assert depth.most(ROWS) == 8
    observed(depth, [8, 8], [0, 0], 30)
    assert depth.most(ROWS) == 0


@pytest.mark.req("SD-28")
def test_no_drafts_where_verifying_them_costs_more_than_they_give():
    depth = DraftDepth(64, 8, CHEAP)
    assert depth.most(ROWS) > 0
    assert depth.most(np.arange(64, dtype=np.int32)) == 0


def test_a_row_without_proposals_does_not_pay_for_the_other():
    depth = DraftDepth(4, 8, [Timing(1, 0, 1.0), Timing(1, 8, 4.0)])
    assert depth.choose(ROWS, counts(8, 8)) > 0
    assert depth.choose(ROWS, counts(1, 0)) == 0


def test_drafts_that_cost_more_than_measured_at_the_start_are_learned():
    depth = DraftDepth(4, 8, CHEAP)
    first = depth.most(ROWS)
    for _ in range(100):
        for drafts in depth.depths[1:]:
            depth.observe_step(2, 0, 1.0)
            depth.observe_step(2, drafts, 2.9)
            depth.observe_step(2, 0, 0.5)
    assert first > 0 and depth.most(ROWS) == 0


def test_a_machine_that_becomes_slow_makes_drafts_no_dearer():
    depth = DraftDepth(4, 8, CHEAP)
    first = depth.most(ROWS)
    for _ in range(100):
        depth.observe_step(2, first, 20.0)
    assert depth.most(ROWS) == first > 0


def test_after_many_steps_with_drafts_one_without_is_compared_with_them():
    depth = DraftDepth(4, 8, CHEAP)

    def plain() -> list[int]:
        return [at for at in range(200) if depth.choose(ROWS, counts(8, 8)) == 0]

    assert plain()[:3] == [7, 15, 23], "while what they cost is known from the start alone"
    for _ in range(4):
        depth.observe_step(2, 8, 1.4)
        depth.observe_step(2, 0, 1.0)
    assert np.diff(plain()).tolist() == [64, 64] and not depth.rests(2)


def test_one_step_that_was_held_up_teaches_nothing():
    depth = DraftDepth(4, 8, CHEAP)
    before = depth.most(ROWS)
    for drafts in depth.depths:
        depth.observe_step(2, drafts, 1000.0)
    assert depth.most(ROWS) == before


def test_without_drafts_it_rests_longer_and_longer_and_then_tries_again():
    depth = DraftDepth(4, 8, CHEAP)
    observed(depth, [4, 4], [0, 0], 30)
    depth._credit[:] = 6.0
    rests, idle = [], []
    while depth.most(ROWS) == 0:
        idle.append(depth.idle)
        rests.append(sum(1 for _ in iter(lambda: depth.rests(2), False)))
    assert rests[:7] == [1, 2, 4, 8, 16, 32, 64]
    assert idle == [rest > 16 for rest in rests], "who reads every step is spared the steps of a long rest"
    assert not depth.idle


@pytest.mark.req("SD-28")
def test_drafts_that_cost_more_than_they_gain_have_a_credit_that_plain_steps_earn_back():
    """Though each single choice is promising: hope is renewed all the time."""
    depth = DraftDepth(4, 8, CHEAP)

    def step() -> tuple[int, float]:
        depth._acceptance, depth._usual = [0.9] * len(depth._acceptance), 0.9
        drafts = 0 if depth.rests(2) else depth.choose(ROWS, counts(8, 8))
        if drafts:
            observed(depth, [drafts, drafts], [0, 0], 1)
        place = depth.depths.index(drafts)
        return drafts, float(depth._costs[1, place]) - 1

    spent = [step()[1] for _ in range(4000)]
    assert 6 < sum(spent) < 7 + 0.005 * 4000
    assert sum(spent[2000:]) > 0.8 * 0.005 * 2000, "it goes on to try"
    while not step()[0]:
        pass
    observed(depth, [8, 8], [8, 8], 1)
    assert all(step()[0] for _ in range(3)), "what pays has credit at once"


def test_a_head_that_costs_more_than_it_gains_rests_at_once():
    depth = DraftDepth(4, 8, CHEAP)
    assert depth.most(ROWS) > 0
    for _ in range(20):
        depth.followed(2, float(depth._usual_s[1]) / 2)
    assert depth.most(ROWS) == 0 and depth.idle


def test_what_does_not_pay_for_many_rows_is_tried_again_where_few_are_left():
    depth = DraftDepth(64, 8, CHEAP)
    while depth.most(np.arange(64, dtype=np.int32)) == 0 and not depth.idle:
        while depth.rests(64):
            pass
    assert depth.rests(64) and depth.rests(40), "no fewer by half"
    assert all(depth.rests(2) for _ in range(7)) and depth.rests(64), "between two waves of requests"
    assert [depth.rests(2) for _ in range(8)] == [True] * 7 + [False]
    assert depth.most(ROWS) > 0


def test_rows_without_drafts_share_what_those_of_others_cost():
    """One row's drafts make a step of 64 little longer, and of its tokens few more."""
    depth = DraftDepth(64, 8, [Timing(1, 0, 1.0), Timing(1, 8, 9.0), Timing(64, 0, 1.0), Timing(64, 8, 3.0)])
    assert depth.most(ROWS[:1]) == 0 and depth.most(ROWS[:1], 63) == 0
    observed(depth, [8, 8], [8, 8], 30)
    assert depth.most(ROWS[:1]) == 0 and depth.most(ROWS, 62) > 0


def test_what_is_found_is_soon_judged_again():
    depth, rests = DraftDepth(4, 8, CHEAP), []
    observed(depth, [4, 4], [0, 0], 30)
    for _ in range(8):
        assert depth.choose(ROWS, counts(8, 8)) == 0 and not depth.idle
        rests.append(sum(1 for _ in iter(lambda: depth.rests(2), False)))
    assert rests == [1, 2, 4, 8, 16, 32, 32, 32]


def test_the_first_comparisons_outweigh_what_was_measured_at_the_start():
    depth = DraftDepth(4, 8, CHEAP)
    assert depth.most(ROWS) > 0
    for drafts in depth.depths[1:]:
        for _ in range(8):
            depth.observe_step(2, 0, 1.0)
            depth.observe_step(2, drafts, 3.9)
    assert depth.most(ROWS) == 0


def test_drafts_that_are_too_few_are_asked_for_again_sooner_than_wrong_ones():
    depth, waits = DraftDepth(4, 8, [Timing(1, 0, 1.0), Timing(1, 1, 2.0), Timing(1, 8, 4.0)]), []
    observed(depth, [4, 4], [4, 4], 12)
    for _ in range(5):
        assert depth.choose(ROWS, counts(1, 0)) == 0
        waits.append(sum(1 for _ in iter(lambda: depth.rests(2), False)))
    assert waits == [1, 2, 4, 8, 8]


def test_a_new_request_ends_the_rest_where_drafts_pay_for_most():
    depth = DraftDepth(4, 8, CHEAP)
    observed(depth, [1, 1], [0, 0], 14)  # these two are bad, which does not say much of others
    assert depth.most(ROWS) == 0
    depth.admit(2)
    assert not depth.rests(2)


def test_a_new_request_does_not_end_the_rest_where_drafts_pay_for_nobody():
    depth = DraftDepth(4, 8, CHEAP)
    observed(depth, [4, 4], [0, 0], 100)
    assert depth.most(ROWS) == 0
    depth.admit(2)
    assert depth.rests(2)


def test_a_proposer_that_finds_nothing_is_soon_asked_again():
    depth, waits = DraftDepth(4, 8, CHEAP), []
    for _ in range(7):
        assert depth.most(ROWS) > 0 and depth.choose(ROWS, counts(0, 0)) == 0
        waits.append(sum(1 for _ in iter(lambda: depth.rests(2), False)))
    assert waits == [1, 2, 4, 8, 8, 8, 8]
    assert depth.choose(ROWS, counts(3, 0)) > 0
    assert depth.choose(ROWS, counts(0, 0)) == 0
    assert [depth.rests(2), depth.rests(2)] == [True, False], "what was found begins anew"


def test_each_number_of_drafts_has_its_own_time():
    """Where four drafts leave the tape, one and two do not cost a part of that."""
    timings = [Timing(1, 0, 1.0), Timing(1, 1, 1.1), Timing(1, 2, 1.2), Timing(1, 4, 9.0)]
    assert DraftDepth(4, 4, timings).most(ROWS) == 2


def test_a_new_request_is_believed_to_be_like_those_before_it():
    depth = DraftDepth(4, 8, CHEAP)
    other = np.arange(2, 4, dtype=np.int32)
    assert depth.most(other) > 0
    observed(depth, [4, 4], [0, 0], 100)
    depth.admit(2)
    depth.admit(3)
    assert depth.most(other) == 0


def test_what_follows_a_rejected_draft_says_nothing():
    depth, other = DraftDepth(4, 8, CHEAP), DraftDepth(4, 8, CHEAP)
    observed(depth, [8, 8], [0, 0], 2)
    observed(other, [1, 1], [0, 0], 2)
    assert depth.most(ROWS) == other.most(ROWS)
