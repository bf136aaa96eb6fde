"""What a device lets a step cost, against figures worked out by hand."""

from pathlib import Path

import numpy as np
import pytest
from harness import make_config

from penstock.engine.core.measure.step_cost import step_cost
from penstock.engine.core.measure.step_meter import StepMeter
from penstock.engine.core.plan import StepPlan, empty
from penstock.engine.cost import ModelCost, StepCost, WindowCost
from penstock.engine.loading.checkpoint import read_model_config
from penstock.engine.roofline import H200, Ceilings, binding, floor_s, max_sequences

SHAPES = Path(__file__).parents[3] / "benchmarks/shapes"
MEASURED = Ceilings(bytes_per_s=4.3e12, flops_per_s=790e12)


def model(shape: str) -> ModelCost:
    found = read_model_config(SHAPES / shape, served_names=(), load_format="dummy").cost
    assert found is not None
    return found


def decode(shape: str, batch: int, context: int) -> StepCost:
    return step_cost(model(shape), np.ones(batch, np.int32), np.full(batch, context, np.int32), batch)


@pytest.mark.req("PERF-01")
@pytest.mark.parametrize(
    ("shape", "milliseconds"), [("qwen3-0.6b", 0.277), ("llama-3.1-8b", 3.49), ("qwen3-8b", 3.52), ("qwen3-14b", 6.51)]
)
def test_one_decode_reads_every_weight(shape: str, milliseconds: float) -> None:
    assert floor_s(decode(shape, 1, 1), MEASURED) == pytest.approx(milliseconds / 1000, rel=0.005)


@pytest.mark.req("PERF-01")
@pytest.mark.parametrize(
    ("shape", "batch", "tokens_per_s"),
    [("qwen3-0.6b", 256, 35_200), ("llama-3.1-8b", 8, 2_139), ("llama-3.1-8b", 256, 22_300), ("qwen3-14b", 64, 7_108)],
)
def test_batches_share_the_weights_and_read_their_own_keys(shape: str, batch: int, tokens_per_s: float) -> None:
    assert batch / floor_s(decode(shape, batch, 1024), MEASURED) == pytest.approx(tokens_per_s, rel=0.01)


def test_the_balance_point_is_operations_a_byte() -> None:
    assert Ceilings(3e12, 1000e12).balance_point == pytest.approx(333, abs=0.5)
    assert H200.balance_point == pytest.approx(206, abs=0.5)


def test_three_loads_meet_three_ceilings() -> None:
    """A lone decode the bandwidth, a prompt of 8k the processor, and long contexts the capacity."""
    assert binding(decode("llama-3.1-8b", 1, 1024), MEASURED) == "bandwidth"
    shape, prompt = model("llama-3.1-8b"), np.array([8192], np.int32)
    found = step_cost(shape, prompt, prompt, 1)
    assert binding(found, MEASURED) == "compute"
    assert floor_s(found, MEASURED) == pytest.approx(0.167, rel=0.02)
    assert max_sequences(shape, 128_000, 100 * 10**9) == 5
    windowed = ModelCost(
        linear_flops_per_token=1,
        lm_head_flops_per_row=1,
        layer_weight_bytes=1,
        lm_head_bytes=1,
        windows=(WindowCost(None, 1, 10), WindowCost(100, 1, 50)),
    )
    assert max_sequences(windowed, 1000, 150_000) == 10, "layers with a window keep no more than that"


def plan_of(*tokens: int) -> StepPlan:
    count = np.array(tokens, np.int32)
    return StepPlan(1, empty(), [], [empty()], [empty()], np.arange(len(count), dtype=np.int32), count, np.ones(len(count), bool))


def test_the_meter_holds_each_step_to_the_ceiling_that_it_meets() -> None:
    shape, meter = model("qwen3-0.6b"), StepMeter(model("qwen3-0.6b"), MEASURED)
    expected = 0.0
    for tokens, ends in (((1, 1), (500, 900)), ((2000,), (2000,))):
        new, upto = np.array(tokens, np.int32), np.array(ends, np.int32)
        meter.submitted(plan_of(*tokens), upto)
        expected += floor_s(step_cost(shape, new, upto, len(tokens)), MEASURED)
    roofline = meter.stats().roofline
    assert roofline is not None and roofline.floor_s == pytest.approx(expected) and roofline.ceilings == MEASURED
    total = meter.stats().cost
    assert total is not None and floor_s(total, MEASURED) < expected, "the sum alone would hide that the steps differ"
    assert StepMeter(shape).stats().roofline is None and StepMeter(make_config().model.cost, MEASURED).stats().roofline is None
