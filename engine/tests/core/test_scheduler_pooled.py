"""Requests that end with their prompts."""

import pytest
from harness import Machine, make_config, make_request

from penstock.engine.config import PoolingConfig

POOLING = PoolingConfig(tokens="last", normalize=True, size=1)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("lengths", "budget"), [([17], 16), ([17, 15, 17], 48), ([16], 16), ([1, 2, 17, 16], 5)])
def test_prompts_as_long_as_the_context_end_whatever_is_left_for_the_last_step(lengths, budget, depth):
    machine = Machine(make_config(max_model_len=17, budget=budget, depth=depth, pooling=POOLING))
    machine.add(*[make_request(index, [index] * length, 1) for index, length in enumerate(lengths)])
    machine.run(limit=100).check_no_leak()
    assert machine.pooled == dict(enumerate(lengths)), "each is pooled where its prompt ends, and once"
    assert sum(int(plan.num_new_tokens.sum()) for plan in machine.plans) == sum(lengths), "no token runs twice"
