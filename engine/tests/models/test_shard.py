"""How a pipeline's stages divide the layers."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.models.layers.shard import Stage, divided


@given(st.lists(st.sampled_from((1.0, 2.5, 4.0, 16.0)), min_size=1, max_size=8), st.integers(1, 8))
def test_no_other_division_has_a_smaller_largest_part(sizes, parts):
    parts = min(parts, len(sizes))
    ways = [
        [range(start, end) for start, end in itertools.pairwise((0, *cuts, len(sizes)))]
        for cuts in itertools.combinations(range(1, len(sizes)), parts - 1)
    ]

    def unevenness(spans):
        of_parts = [sum(sizes[index] for index in span) for span in spans]
        return max(of_parts), sum(size * size for size in of_parts)

    found = divided(sizes, parts)
    assert found in ways and unevenness(found) == min(map(unevenness, ways))


@pytest.mark.parametrize(
    ("sizes", "stages", "expected"),
    [
        ([1.0] * 7, 3, [2, 2, 3]),
        ([1.0] * 5 + [5.0], 2, [5, 1]),  # the LM head is as large as four layers
        ([8.0, 1.0, 1.0, 1.0], 2, [1, 3]),
    ],
)
def test_stages_are_divided_by_size(sizes, stages, expected):
    found = [Stage(rank, stages).layers(sizes) for rank in range(stages)]
    assert [len(span) for span in found] == expected
    assert [index for span in found for index in span] == list(range(len(sizes)))
