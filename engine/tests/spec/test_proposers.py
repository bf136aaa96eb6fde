"""Proposers over rows, and how many drafts pay."""

import numpy as np
import pytest

from penstock.engine.config import SpeculativeConfig
from penstock.engine.core.row_table import RowTable
from penstock.engine.spec.costs import Timing
from penstock.engine.spec.depth import DraftDepth
from penstock.engine.spec.filling import to_few_sizes, to_whole_rows
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


def choice(depth, *proposed, first=0, usable=None, others=0):
    """Of rows from the first on, all of whose drafts are of use."""
    rows, each = np.arange(first, first + len(proposed), dtype=np.int32), np.array(proposed, np.int32)
    return depth.choose(rows, each, each if usable is None else np.array(usable, np.int32), others)


def chosen(depth, *proposed):
    """Drafts of all rows together that are chosen; 0: none."""
    return sum(choice(depth, *proposed) or [])


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
    depth = DraftDepth(4, 8, [Timing(1, 0, 1.0), Timing(1, 1, 2.0), Timing(1, 8, 2.2)])
    assert chosen(depth, 8, 8) > 0
    assert chosen(depth, 1, 0) == 0


@pytest.mark.req("SD-28")
def test_the_likeliest_drafts_of_all_rows_are_chosen():
    """Where a row's drafts are mostly wrong, those of the other are verified alone."""
    depth = DraftDepth(4, 8, [Timing(rows, drafts, 1.0 + 0.25 * drafts) for rows in (1, 4) for drafts in (0, 8)])
    for _ in range(12):
        depth.observe(ROWS, np.array([4, 1], np.int32), np.array([4, 0], np.int32))
    good, bad = choice(depth, 8, 8) or [0, 0]
    assert good > 4 and bad == 0
    assert choice(depth, 2, 8) == [2, 0], "and no more than there are"


@pytest.mark.req("SD-28")
def test_the_first_steps_of_a_full_batch_have_few_drafts():
    """Those of all rows would cost much to find out that they are wrong. A device has no steps with so few."""
    cheap = [Timing(rows, drafts, 1.0 + 0.01 * drafts) for rows in (1, 32) for drafts in (0, 8)]
    depth, rows = DraftDepth(32, 8, cheap), np.arange(32, dtype=np.int32)
    for expected in (8, 24, 96, 256):
        each = choice(depth, *[8] * 32) or []
        assert sum(each) == expected
        drafted = np.array(each, np.int32)
        depth.observe(rows, drafted, drafted)
    assert chosen(DraftDepth(32, 8, cheap, fill=to_whole_rows(8, most=512)), *[8] * 32) == 256


def test_steps_are_filled_up_to_few_sizes():
    fill = to_few_sizes(64)
    sizes = [fill(4, tokens) for tokens in range(1, 66)]
    assert sizes[:8] == list(range(1, 9)) and sizes[64] == 65, "so few have a size of their own, and so many no tape"
    assert sorted(set(sizes[8:64])) == [10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64]
    assert all(size >= tokens for tokens, size in enumerate(sizes, 1))
    assert DraftDepth(4, 8, CHEAP).fill(4, 9) == 9


def test_a_device_verifies_as_many_drafts_of_each_row():
    """Where there is a graph of them, and where they pay as many: two good rows of four do not pay for the others."""
    fill = to_whole_rows(8, most=36)
    assert [fill(rows, rows + 3) for rows in (1, 4, 5)] == [9, 36, 8]
    dear = [Timing(rows, drafts, 1.0 + 0.25 * drafts) for rows in (1, 4) for drafts in (0, 8)]
    proposed = [8, 8, 0, 0]
    assert choice(DraftDepth(4, 8, dear, fill=fill), *proposed) is None
    assert choice(DraftDepth(4, 8, dear), *proposed) is not None
    assert choice(DraftDepth(4, 8, alike(1.4), fill=fill), *proposed) == proposed


def test_drafts_that_cost_more_than_measured_at_the_start_are_learned():
    depth = DraftDepth(4, 8, CHEAP)
    first = depth.most(ROWS)
    for _ in range(100):
        for drafts in depth.depths[1:]:
            compared(depth, 2.9, drafts=drafts, plain=0.5)
    assert first > 0 and depth.most(ROWS) == 0


def test_a_machine_that_becomes_slow_makes_drafts_no_dearer():
    depth = DraftDepth(4, 8, CHEAP)
    first = depth.most(ROWS)
    for _ in range(100):
        depth.observe_step(2, first, 20.0)
    assert depth.most(ROWS) == first > 0


def compared(depth, seconds, rows=2, drafts=8.0, plain=1.0):
    """A step with drafts and four without; the first of these take longer than the last."""
    for number, took in ((drafts, seconds), *[(0, 1.5 * plain)] * 3, (0, plain)):
        depth.observe_step(rows, number, took)


def test_steps_that_take_longer_behind_drafts_make_these_no_cheaper():
    depth = DraftDepth(4, 8, CHEAP)
    for _ in range(100):
        compared(depth, 2.0)
    assert abs(depth.costs.of(2, 8.0) - 2.0) < 0.02


def test_the_end_of_a_long_rest_is_compared_too():
    """Far from drafts a step takes less than the fourth behind them, and these are as much dearer."""
    depth = DraftDepth(4, 8, CHEAP)
    for _ in range(4):
        compared(depth, 2.0)
    assert not depth.learns_from(2, 0)
    observed(depth, [4, 4], [0, 0], 30)
    seen = []
    for _ in range(8):
        assert chosen(depth, 8, 8) == 0
        while depth.rests(2):
            seen.append(depth.learns_from(2, 0))
    rests = (1, 2, 4, 8, 16, 32, 32, 32)
    assert [at + 1 for at, learns in enumerate(seen) if learns] == [sum(rests[:number]) for number in range(5, 9)]
    for _ in range(2):
        depth.observe_step(2, 0, 0.8)
    assert depth.costs.in_steps(2, 0.8) == 1.0


def alike(seconds):
    """Eight drafts of each row make a step take so much longer, whatever the number of rows."""
    return [Timing(rows, drafts, took) for rows in (1, 4) for drafts, took in ((0, 1.0), (8, seconds))]


def plain_steps(depth):
    """When no drafts are chosen, of 800 steps."""
    return [at for at in range(800) if chosen(depth, 8, 8) == 0]


def test_after_many_steps_with_drafts_some_without_are_compared_with_them():
    depth = DraftDepth(4, 8, alike(3.5))
    first, second, *_ = plain_steps(depth)
    assert (first, second) == (138, 138 + 256), "the first had a prompt beside it, and told nothing"
    assert [depth.rests(2) for _ in range(4)] == [True, True, True, False], "there are four of them"
    compared(depth, 3.5)
    assert plain_steps(depth)[0] == 138


def test_drafts_that_gain_little_are_compared_more_often():
    depth = DraftDepth(4, 8, alike(5.0))
    for _ in range(6):
        compared(depth, 5.0)
    assert plain_steps(depth)[0] < 60


def test_one_step_that_was_held_up_teaches_nothing():
    depth = DraftDepth(4, 8, CHEAP)
    before = depth.most(ROWS)
    for drafts in depth.depths:
        depth.observe_step(2, drafts, 1000.0)
    assert depth.most(ROWS) == before


def test_without_drafts_it_rests_longer_and_longer_and_then_tries_again():
    depth = DraftDepth(4, 8, CHEAP)
    observed(depth, [4, 4], [0, 0], 30)
    depth._credit[:] = [4.0] * len(depth._credit)
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
        depth.acceptance._of_row, depth.acceptance._usual = [0.9] * 4, 0.9
        drafts = 0 if depth.rests(2) else chosen(depth, 8, 8)
        if drafts:
            observed(depth, [drafts // 2, drafts - drafts // 2], [0, 0], 1)
        cost = depth.costs.of(2, drafts / 2)
        depth.observe_step(2, drafts / 2, cost)
        return drafts, cost - 1

    spent = [step()[1] for _ in range(4000)]
    assert 4 < sum(spent) < 5 + 0.005 * 4000
    assert sum(spent[2000:]) > 0.8 * 0.005 * 2000, "it goes on to try"
    while not step()[0]:
        pass
    observed(depth, [8, 8], [8, 8], 1)
    assert sum(step()[0] > 0 for _ in range(5)) > 1, "what pays has credit at once"


def test_a_few_bad_steps_are_no_reason_to_rest_while_look_ups_gain():
    depth = DraftDepth(4, 8, CHEAP)
    observed(depth, [8, 8], [8, 8], 40)
    depth._credit[:] = [-1.0] * len(depth._credit)
    assert chosen(depth, 8, 8) > 0
    depth._stand_no_longer()
    asked_in_vain(depth)
    depth._credit[:] = [-1.0] * len(depth._credit)
    assert chosen(depth, 8, 8) == 0 and depth.rests(2)


def test_a_head_that_costs_more_than_it_gains_rests_at_once():
    depth = DraftDepth(4, 8, CHEAP)
    assert depth.most(ROWS) > 0
    for _ in range(20):
        depth.followed(2, 0.5)
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
    """Two rows' drafts make a step of 64 little longer, which is learned, and of its tokens few more."""
    seconds = {0: 1.0, 0.25: 1.6, 8: 3.0}
    depth = DraftDepth(64, 8, [Timing(1, 0, 1.0), Timing(1, 8, 9.0), *(Timing(64, *it) for it in seconds.items())])
    assert depth.most(ROWS[:1]) == 0 and depth.most(ROWS[:1], 63) == 0
    observed(depth, [8, 8], [8, 8], 30)
    assert depth.most(ROWS[:1]) == 0 and depth.most(ROWS, 62) == 0
    for _ in range(40):
        compared(depth, 1.05, rows=64, drafts=0.25)
    assert depth.most(ROWS[:1]) == 0 and depth.most(ROWS, 62) > 0


def test_what_is_found_is_soon_judged_again():
    depth, rests = DraftDepth(4, 8, CHEAP), []
    observed(depth, [4, 4], [0, 0], 30)
    for _ in range(8):
        assert chosen(depth, 8, 8) == 0 and not depth.idle
        rests.append(sum(1 for _ in iter(lambda: depth.rests(2), False)))
    assert rests == [1, 2, 4, 8, 16, 32, 32, 32]


def test_the_first_comparisons_outweigh_what_was_measured_at_the_start():
    depth = DraftDepth(4, 8, CHEAP)
    assert depth.most(ROWS) > 0
    for drafts in depth.depths[1:]:
        for _ in range(8):
            compared(depth, 3.9, drafts=drafts)
    assert depth.most(ROWS) == 0


def test_drafts_that_are_too_few_are_asked_for_again_sooner_than_wrong_ones():
    depth, waits = DraftDepth(4, 8, [Timing(1, 0, 1.0), Timing(1, 1, 2.0), Timing(1, 8, 4.0)]), []
    observed(depth, [4, 4], [4, 4], 12)
    asked_in_vain(depth)
    for _ in range(5):
        assert chosen(depth, 1, 0) == 0
        waits.append(sum(1 for _ in iter(lambda: depth.rests(2), False)))
    assert waits == [1, 2, 4, 8, 8]


def asked_in_vain(depth):
    """So often that one look-up after the other would cost more than it gains."""
    for _ in range(500):
        depth.in_vain(2, 0.01)


def test_while_look_ups_gain_more_than_they_cost_each_step_has_one():
    """A find now and then pays for those in vain, and a proposal that is too short is looked at again after a step."""
    depth = DraftDepth(4, 8, CHEAP)
    depth.found_nothing(ROWS)
    assert depth.rests(2), "nothing has been gained yet"
    while depth.rests(2):
        pass
    observed(depth, [8, 8], [8, 8], 4)
    for _ in range(3):
        depth.found_nothing(ROWS)
        depth.in_vain(2, 0.01)
        assert not depth.rests(2)
    asked_in_vain(depth)
    depth.found_nothing(ROWS)
    assert depth.rests(2)


def test_a_single_row_looks_up_in_vain_for_longer_than_many():
    """Its text may repeat a little later; among many rows, as many look-ups have shown more."""

    def in_vain(num_rows):
        depth, rows, count = DraftDepth(4, 8, CHEAP), np.arange(num_rows, dtype=np.int32), 0
        for _ in range(200):
            depth.observe(rows, np.full(num_rows, 8, np.int32), np.full(num_rows, 8, np.int32))
        depth.found_nothing(rows)
        while not depth.rests(num_rows):
            depth.in_vain(num_rows, 0.1 / depth.costs.in_steps(num_rows, 1.0))
            depth.found_nothing(rows)
            count += 1
        return count

    assert in_vain(1) > 2 * in_vain(4)


def test_what_one_size_of_batch_gains_says_nothing_of_another():
    depth = DraftDepth(4, 8, CHEAP)
    depth.observe(np.array([0], np.int32), np.array([8], np.int32), np.array([8], np.int32))
    depth.found_nothing(ROWS)
    assert depth.rests(2)


def test_short_proposals_are_believed_by_their_length():
    """What rests on little text is often wrong where long proposals are right, and does not take these along."""
    depth = DraftDepth(4, 8, [Timing(rows, drafts, 1 + drafts / 16) for rows in (1, 4) for drafts in (0, 1, 8)])
    assert chosen(depth, 1, 1) == 2
    for _ in range(60):
        depth.acceptance.proposed([0, 1], [1, 1])
        observed(depth, [1, 1], [0, 0], 1)
        depth.acceptance.proposed([0, 1], [8, 8])
        observed(depth, [8, 8], [8, 8], 1)
    assert chosen(depth, 1, 1) == 0
    assert chosen(depth, 8, 8) == 16


def standing(depth):
    """A choice of all drafts, whose cost is known well, and of which none was wrong."""
    observed(depth, [8, 8], [8, 8], 12)
    compared(depth, 2.0)
    for _ in range(4):
        assert chosen(depth, 8, 8) == 16 and depth.learns_from(2, 16)
        depth.observe_step(2, 8.0, 2.0)
        observed(depth, [8, 8], [8, 8], 1)
    assert chosen(depth, 8, 8) == 16
    observed(depth, [8, 8], [8, 8], 1)


def steps_it_stands(depth):
    """Steps whose drafts are chosen because the choice stands, of which nothing is timed."""
    count = 0
    while not depth.rests(2) and chosen(depth, 8, 8) == 16 and not depth.learns_from(2, 16):
        observed(depth, [8, 8], [8, 8], 1)
        count += 1
    return count


@pytest.mark.req("SD-28")
def test_a_choice_of_all_drafts_stands_for_some_steps_while_they_are_right():
    """To choose and to learn anew in each step costs a small model a twentieth of it."""
    depth = DraftDepth(4, 8, alike(2.0))
    standing(depth)
    assert steps_it_stands(depth) == 7
    assert steps_it_stands(depth) == 7, "behind each choice"


@pytest.mark.parametrize(
    "end",
    [
        lambda depth: observed(depth, [8, 8], [8, 7], 1),
        lambda depth: depth.admit(1),
        lambda depth: chosen(depth, 3, 8),
        lambda depth: depth.found_nothing(ROWS),
        lambda depth: choice(depth, 8, 8, first=1),
        lambda depth: choice(depth, 8, 8, others=1),
    ],
    ids=["a wrong draft", "a request", "a short proposal", "no proposal", "other rows", "a row beside them"],
)
def test_a_choice_stands_no_longer_behind(end):
    depth = DraftDepth(4, 8, alike(2.0))
    standing(depth)
    end(depth)
    while depth.rests(2):
        pass
    assert chosen(depth, 8, 8) > 8 and depth.learns_from(2, 16)


def test_while_a_choice_stands_there_is_room_for_as_many_drafts_as_ever():
    depth = DraftDepth(4, 8, alike(2.0))
    standing(depth)
    assert choice(depth, 8, 8, usable=[8, 3]) == [8, 3]
    assert not depth.learns_from(2, 11)


def test_what_is_put_off_while_a_choice_stands_is_learned_all_the_same(monkeypatch):
    each, anew = (DraftDepth(4, 8, alike(2.0)) for _ in range(2))
    for depth, steps in ((each, 7), (anew, 0)):
        monkeypatch.setattr("penstock.engine.spec.depth._STANDS", steps)
        standing(depth)
        for _ in range(4):
            assert chosen(depth, 8, 8) == 16
            observed(depth, [8, 8], [8, 8], 1)
    assert each.acceptance.judged < anew.acceptance.judged, "not yet"
    for depth in (each, anew):
        observed(depth, [8, 8], [1, 8], 1)
        assert depth.acceptance.of_whole([0])[0][0] < 0.95
    assert vars(each.acceptance) == vars(anew.acceptance)
    assert (each._credit, each._worth) == (anew._credit, anew._worth)


def test_room_for_few_makes_no_proposal_a_short_one():
    depth = DraftDepth(4, 8, CHEAP)
    depth.acceptance._of_length = [0.0] * 8
    assert choice(depth, 8, 8, usable=[2, 2]) == [2, 2]
    assert choice(depth, 2, 2, usable=[2, 2]) is None


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


def test_a_new_request_does_not_end_the_rest_where_drafts_would_not_be_chosen():
    seconds = [Timing(rows, drafts, took) for rows in (1, 4) for drafts, took in ((0, 1.0), (1, 1.5))]
    depth = DraftDepth(4, 1, seconds, margin=1.15)  # a token in 1.5 steps, seven times in ten, is a gain of 13 %
    assert depth.most(ROWS) == 0
    depth.admit(2)
    assert depth.rests(2)


def test_who_takes_long_to_look_up_waits_longer():
    """A tenth of a step, in vain, is spent only every 20 steps."""
    depth, waits = DraftDepth(4, 8, CHEAP), []
    for _ in range(7):
        depth.found_nothing(ROWS)
        waits.append(sum(1 for _ in iter(lambda: depth.rests(2), False)))
        depth.in_vain(2, 0.1 / depth.costs.in_steps(2, 1.0))
    assert waits == [2, 4, 8, 16, 20, 20, 20]


@pytest.mark.req("SD-28")
def test_looking_up_in_vain_spends_no_credit():
    """Who has none must get it back from steps without drafts, though it looks for some all the time."""
    depth = DraftDepth(4, 8, CHEAP)
    depth._credit = [-1.0] * len(depth._credit)
    steps = 0
    while steps < 250 and (depth.rests(2) or not chosen(depth, 8, 8)):
        depth.in_vain(2, 0.05)
        steps += 1
    assert 200 <= steps < 250


def test_a_proposer_that_finds_nothing_is_soon_asked_again():
    depth, waits = DraftDepth(4, 8, CHEAP), []
    for _ in range(7):
        assert chosen(depth, 0, 0) == 0
        waits.append(sum(1 for _ in iter(lambda: depth.rests(2), False)))
    assert waits == [1, 2, 4, 8, 8, 8, 8]
    assert chosen(depth, 3, 0) > 0
    assert chosen(depth, 0, 0) == 0
    assert [depth.rests(2) for _ in range(3)] == [True, True, False], "one find makes it a quarter of that"
    assert chosen(depth, 3, 0) > 0 and chosen(depth, 3, 0) > 0
    assert chosen(depth, 0, 0) == 0
    assert [depth.rests(2), depth.rests(2)] == [True, False], "a text that repeats begins anew"


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
