"""Proposers over rows, and how many drafts pay."""

import numpy as np
import pytest

from penstock.engine.config import SpeculativeConfig
from penstock.engine.spec.depth import DraftDepth
from penstock.engine.spec.proposer import make_proposer


def proposed(proposer, tokens):
    token_ids = np.array([tokens], np.int32)
    (drafts,) = proposer.propose(token_ids, np.zeros(1, np.int32), np.array([len(tokens)], np.int32))
    return drafts.tolist()


@pytest.mark.req("SD-12")
def test_ngrams_of_the_lengths_that_were_asked_for():
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_min=2, prompt_lookup_max=3)
    proposer = make_proposer(config, None)
    assert proposed(proposer, [1, 2, 3, 4, 2, 3]) == [4, 2]
    assert proposed(proposer, [1, 3, 4, 2, 3]) == [-1, -1]


@pytest.mark.req("SD-14")
def test_repeated_outputs_make_longer_drafts():
    proposer = make_proposer(SpeculativeConfig(method="suffix", num_speculative_tokens=8), None)
    output = np.arange(10, 30, dtype=np.int32)
    assert proposed(proposer, [1, 10, 11, 12]) == [-1] * 8
    proposer.ended(output)
    assert proposed(proposer, [1, 10, 11, 12]) == [13, 14, 15, *[-1] * 5]
    assert proposed(proposer, [1, *range(10, 18)]) == list(range(18, 26))


def test_other_requests_can_be_left_out():
    config = SpeculativeConfig(method="suffix", num_speculative_tokens=2, suffix_decoding_max_cached_requests=0)
    proposer = make_proposer(config, None)
    proposer.ended(np.arange(10, 30, dtype=np.int32))
    assert proposed(proposer, [10, 11, 12, 13]) == [-1, -1]
    assert proposed(proposer, [5, 6, 7, 5, 6]) == [7, 5]


ROWS = np.arange(2, dtype=np.int32)


def observed(depth, drafted, accepted, steps):
    for _ in range(steps):
        depth.observe(ROWS, np.array(drafted, np.int32), np.array(accepted, np.int32))


@pytest.mark.req("SD-29")
def test_a_row_whose_drafts_are_accepted_gets_more_of_them_and_another_none():
    depth = DraftDepth(4, 8, [(1, 0.2), (64, 0.2)])
    first = depth.choose(ROWS)
    assert first[0] == first[1] and 0 < first[0] < 8
    observed(depth, [4, 4], [4, 0], 12)
    high, low = depth.choose(ROWS).tolist()
    assert (high, low) == (8, 0)


@pytest.mark.req("SD-28")
def test_no_drafts_where_verifying_one_costs_a_step():
    depth = DraftDepth(64, 8, [(1, 0.05), (32, 1.0)])
    assert depth.choose(ROWS).min() > 0
    assert depth.choose(np.arange(32, dtype=np.int32)).max() == 0


def test_a_row_without_drafts_tries_again_after_a_while():
    depth = DraftDepth(4, 4, [(1, 0.2)])
    observed(depth, [4, 4], [0, 0], 12)
    assert depth.choose(ROWS).max() == 0
    observed(depth, [0, 0], [0, 0], 200)
    assert depth.choose(ROWS).min() > 0


def test_a_new_request_does_not_inherit():
    depth = DraftDepth(4, 4, [(1, 0.2)])
    expected = depth.choose(ROWS).tolist()
    observed(depth, [4, 4], [0, 0], 12)
    depth.admit(0)
    assert depth.choose(ROWS).tolist() == [expected[0], 0]


def test_what_follows_a_rejected_draft_says_nothing():
    depth = DraftDepth(4, 8, [(1, 0.2)])
    observed(depth, [8, 1], [0, 0], 3)
    assert len(set(depth.choose(ROWS).tolist())) == 1
