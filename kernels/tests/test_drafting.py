"""Drafts by looking back: known cases, and the compiled form against the reference on random tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.drafting.ops import REFERENCE, drafting_ops

FORMS = [REFERENCE, drafting_ops()]


@pytest.fixture(params=FORMS, ids=[form.form for form in FORMS])
def ops(request):
    return request.param


def table(*rows):
    token_ids = np.full((len(rows), max(map(len, rows))), 99, np.int32)
    for at, row in enumerate(rows):
        token_ids[at, : len(row)] = row
    return token_ids, np.arange(len(rows), dtype=np.int32), np.array([len(row) for row in rows], np.int32)


def ngram(ops, row, *limits):
    (drafts,) = ops.ngram_drafts(*table(row), *limits)
    return drafts.tolist()


def test_the_longest_earlier_occurrence_wins_and_of_equal_ones_the_earliest(ops):
    assert ngram(ops, [1, 2, 3, 7, 2, 3, 8, 1, 2, 3], 1, 3, 2) == [7, 2]
    assert ngram(ops, [2, 3, 8, 5, 2, 3, 9, 2, 3], 1, 3, 1) == [8]


def test_no_more_is_compared_than_the_longest_asks_for(ops):
    assert ngram(ops, [3, 8, 2, 3, 9, 2, 3], 1, 1, 1) == [8]
    assert ngram(ops, [3, 8, 2, 3, 9, 2, 3], 1, 2, 1) == [9]


def test_what_is_shorter_than_the_shortest_gives_nothing(ops):
    assert ngram(ops, [3, 8, 2, 3], 2, 4, 2) == [-1, -1]
    assert ngram(ops, [3], 1, 4, 2) == [-1, -1]


def test_drafts_end_with_the_row(ops):
    assert ngram(ops, [4, 5, 4], 1, 3, 4) == [5, 4, -1, -1]


def test_rows_are_drafted_for_by_themselves_wherever_they_are(ops):
    token_ids = np.array([[9, 9, 9, 9], [1, 2, 1, 7], [0, 0, 0, 0], [5, 6, 7, 5]], np.int32)
    drafts = ops.ngram_drafts(token_ids, np.array([3, 1], np.int32), np.array([4, 3], np.int32), 1, 2, 2)
    assert drafts.tolist() == [[6, 7], [2, 1]]


def suffix(ops, row, *outputs, most=4, factor=4.0, least=0.0, sequences=100, capacity=1000, depth=24):
    history = ops.history(sequences, capacity, depth)
    for output in outputs:
        history.add(np.array(output, np.int32))
    (drafts,) = history.drafts(*table(row), most, factor, least)
    return [token for token in drafts.tolist() if token >= 0]


def test_what_followed_most_often_is_proposed(ops):
    row = [1, 2, 5, 1, 2, 6, 1, 2, 5, 0, 1, 2]
    assert suffix(ops, row, most=1) == [5]


def test_outputs_of_others_are_looked_up_and_the_surer_one_wins(ops):
    others = ([1, 2, 3, 40, 41], [1, 2, 3, 40, 42])
    assert suffix(ops, [8, 1, 2, 3], *others) == [40, 42]  # of equally frequent tokens the latest
    assert suffix(ops, [1, 2, 3, 7, 7, 7, 7, 1, 2, 3], *others, least=0.6) == [7, 7, 7, 7]


def test_a_draft_is_as_long_as_it_is_likely(ops):
    others = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], [1, 2, 3, 4, 9, 9])
    assert suffix(ops, [1, 2, 3], *others, least=0.6) == [4, 5]
    assert suffix(ops, [1, 2, 3], *others, factor=1 / 3) == [4]


def test_nothing_follows_the_end_of_an_output(ops):
    assert suffix(ops, [1, 2, 3], [1, 2, 3, 4], [7, 7, 7]) == [4]


def test_the_oldest_outputs_go(ops):
    first, second = [1, 2, 3, 4], [5, 6, 7, 8]
    assert suffix(ops, [1, 2, 3], first, second, sequences=1) == []
    assert suffix(ops, [5, 6, 7], first, second, sequences=1) == [8]
    assert suffix(ops, [1, 2, 3], first, second, capacity=9) == []
    assert suffix(ops, [1, 2, 3], first, second, capacity=10) == [4]


def test_of_a_longer_output_than_there_is_room_for_the_end_is_kept(ops):
    assert suffix(ops, [7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], capacity=6) == [10]
    assert suffix(ops, [2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], capacity=6) == []


TOKENS = st.lists(st.integers(0, 3), max_size=40)


@settings(deadline=None, max_examples=200)
@given(st.lists(TOKENS, min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 4), st.integers(1, 6))
def test_the_compiled_ngrams_equal_the_reference(rows, shortest, more, most):
    arguments = (*table(*[row or [0] for row in rows]), shortest, shortest + more, most)
    assert np.array_equal(FORMS[1].ngram_drafts(*arguments), REFERENCE.ngram_drafts(*arguments))


@settings(deadline=None, max_examples=200)
@given(
    st.lists(TOKENS, min_size=1, max_size=3),
    st.lists(TOKENS, max_size=12),
    st.tuples(st.integers(1, 6), st.integers(8, 120), st.integers(3, 8)),
    st.tuples(st.integers(1, 6), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.0, 0.1, 0.5])),
)
def test_the_compiled_history_equals_the_reference(rows, outputs, sizes, limits):
    found = []
    for form in FORMS:
        history = form.history(*sizes)
        for output in outputs:
            history.add(np.array(output, np.int32))
        found.append(history.drafts(*table(*[row or [0] for row in rows]), *limits))
    assert np.array_equal(*found)
