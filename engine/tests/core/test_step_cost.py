"""Operations and bytes of a step against counts by hand, against brute force."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core.measure.step_cost import step_cost
from penstock.engine.cost import ModelCost, StepCost, WindowCost
from penstock.engine.loading.checkpoint import read_model_config

TINY = Path(__file__).parents[3] / "examples/models/penstock-tiny"
SHAPE = ModelCost(
    linear_flops_per_token=1000,
    lm_head_flops_per_row=50,
    layer_weight_bytes=7000,
    lm_head_bytes=300,
    windows=(WindowCost(None, flops_per_pair=10, kv_bytes_per_token=4), WindowCost(3, flops_per_pair=1, kv_bytes_per_token=2)),
)


def cost(*rows: tuple[int, int], sampled: int = 0) -> StepCost:
    new, ends = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    return step_cost(SHAPE, new, ends, sampled)


@pytest.mark.req("OB-14")
def test_a_step_by_hand():
    """A decode of the 5th token, and a prompt of 4: they see 5 and 1 + 2 + 3 + 4 tokens, through a window of 3 tokens 3 and
    1 + 2 + 3 + 3."""
    found = cost((1, 5), (4, 4), sampled=2)
    assert found == StepCost(
        linear_flops=5 * 1000,
        attention_flops=(5 + 10) * 10 + (3 + 9) * 1,
        lm_head_flops=2 * 50,
        weight_bytes=7000 + 300,
        kv_read_bytes=(5 + 4) * 4 + (3 + 4) * 2,
        kv_write_bytes=5 * 4 + 5 * 2,
    )
    assert (found.flops, found.bytes) == (5000 + 162 + 100, 7300 + 50 + 30)
    assert cost((4, 4)).weight_bytes == 7000, "the LM head is not read where nothing is sampled"


rows = st.lists(st.integers(1, 40).flatmap(lambda end: st.tuples(st.integers(1, end), st.just(end))), min_size=1, max_size=6)


@given(rows)
def test_pairs_and_keys_are_those_that_brute_force_counts(rows: list[tuple[int, int]]):
    found = cost(*rows)
    pairs = keys = 0
    for window, flops, kv_bytes in ((10**9, 10, 4), (3, 1, 2)):
        for new, end in rows:
            seen = [range(max(0, p + 1 - window), p + 1) for p in range(end - new, end)]
            pairs += flops * sum(len(keys_of_one) for keys_of_one in seen)
            keys += kv_bytes * len(set().union(*seen))
    assert (found.attention_flops, found.kv_read_bytes) == (pairs, keys)


@given(rows, st.integers(1, 39))
def test_chunks_cost_what_the_whole_costs_but_for_reading_twice(rows: list[tuple[int, int]], at: int):
    new, end = rows[0]
    cut = min(at, new - 1)
    if cut < 1:
        return
    parts = cost((cut, end - new + cut)) + cost((new - cut, end))
    whole = cost((new, end))
    assert parts.flops == whole.flops and parts.kv_write_bytes == whole.kv_write_bytes
    assert parts.weight_bytes == 2 * whole.weight_bytes


def test_a_checkpoints_cost_is_the_count_of_its_weights():
    """The bytes read once a step are those of the file, without norms and, where it is tied, with the embedding as LM head."""
    from safetensors import safe_open

    model = read_model_config(TINY, served_names=[], dtype="auto", max_model_len=None).cost
    assert model is not None
    matrices = lm_head = 0
    for file in TINY.glob("*.safetensors"):
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                size = int(np.prod(tensors.get_slice(name).get_shape()))
                if "embed_tokens" in name or "lm_head" in name:
                    lm_head = size
                elif "norm" not in name:
                    matrices += size
    assert model.linear_flops_per_token == 2 * matrices and model.lm_head_flops_per_row == 2 * lm_head
