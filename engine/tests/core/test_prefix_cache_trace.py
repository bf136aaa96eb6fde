"""The prefix cache keeps what a radix tree that evicts its oldest leaf would keep."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import bench_prefix_cache as bench


def prompts_of(paths: list[list[int]]) -> list:
    """One prompt a path through a tree of blocks, with half a block at its end; a block's id stands for all before it."""
    ids: dict[tuple[int, ...], int] = {}
    return [
        bench.Prompt(
            len(path) * bench.BLOCK + bench.BLOCK // 2,
            [ids.setdefault(tuple(path[: end + 1]), len(ids)) for end in range(len(path))],
            index,
        )
        for index, path in enumerate(paths)
    ]


@pytest.mark.req("KV-20", "PC-16")
@settings(max_examples=200)
@given(st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=40), st.integers(7, 20))
def test_it_keeps_what_the_radix_tree_keeps(paths, num_blocks):
    prompts = prompts_of(paths)
    assert bench.replay(prompts, num_blocks) == bench.replay_radix(prompts, num_blocks)
    assert bench.replay(prompts, 1000) == bench.replay_infinite(prompts)


@pytest.mark.skipif(not bench.TRACE.is_file(), reason="the Mooncake trace is not beside the repository")
def test_on_the_first_requests_of_a_real_trace():
    prompts = bench.read_trace(bench.TRACE)[:1500]
    for row in bench.measure(prompts):
        assert row["penstock_percent"] >= row["radix_percent"] - bench.TARGET_POINTS
