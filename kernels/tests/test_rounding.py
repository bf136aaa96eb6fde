"""Rounding of inputs to eight bits: the compiled form against the reference, bit by bit."""

import pytest
import torch

from penstock.kernels.cpu.tape import Pool
from penstock.kernels.quantized_linear.reference import pack_quantized, pair_up, quantize
from penstock.kernels.quantized_linear.rounding import Rounding, rounded_inputs

RULES = [
    Rounding("float8", True),
    Rounding("float8", True, 128),
    Rounding("float8", True, 128, power_of_two=True),
    Rounding("int8", True),
    Rounding("int8", True, 32),
    Rounding("float8", False),
    Rounding("int8", False),
]


def inputs(dtype: torch.dtype, size: int) -> torch.Tensor:
    """Of many magnitudes, with rows and groups of zeros, ties, and what is not finite."""
    torch.manual_seed(0)
    x = torch.randn(60, size) * torch.logspace(-6, 6, 60)[:, None]
    x[3], x[4, : size // 2], x[5] = 0.0, 0.0, torch.arange(size) * 0.5 - 20
    x[6, 0], x[7, -1], x[8] = float("nan"), float("inf"), 448.0 * 2**-3
    x[9] *= 1e-42
    return x.to(dtype)


@pytest.mark.req("Q-23")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 128, 333])
def test_the_compiled_form_is_the_reference(native, dtype, rule, size):
    x = inputs(dtype, size)
    for scale, zero in ((0.01, None), (0.37, -5.0)):
        given = () if rule.dynamic else (torch.tensor([scale]), None if zero is None else torch.tensor([zero]))
        if zero is not None and (rule.dynamic or rule.number == "float8"):
            continue
        found, expected = native(dtype).rounded_inputs(x, rule, *given), rounded_inputs(x, rule, *given)
        assert found.dtype is dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert native(dtype).rounded_inputs(x[:0], rule, *given).shape == (0, size)


def test_a_tape_rounds_again(native):
    ops, x = native(torch.float32), torch.randn(4, 300)
    tape = ops.tape(lambda: ops.rounded_inputs(x, RULES[1]), Pool())
    x.mul_(3.0)
    assert torch.equal(tape.run(), rounded_inputs(x, RULES[1]))
    with pytest.raises(ValueError, match="dynamic scales are found here, others are given"):
        ops.rounded_inputs(x, RULES[1], torch.ones(1))


@pytest.mark.req("Q-25")
def test_outliers_that_were_moved_into_the_weight_cost_less(ops_in):
    """SmoothQuant (Xiao et al., 2023), baked into checkpoints: inputs are divided by what weights are multiplied by."""
    torch.manual_seed(0)
    x, weight, ops = torch.randn(40, 64), torch.randn(48, 64), ops_in(torch.float32)
    x[:, [5, 40]] *= 80.0
    moved = (x.abs().amax(0) / weight.abs().amax(0)).sqrt()
    smooth = x / moved, weight * moved
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(smooth[0].double() @ smooth[1].double().T, exact, rtol=1e-5, atol=1e-4)

    def error(inputs: torch.Tensor, numbers: torch.Tensor) -> float:
        values, scales = quantize(numbers, "int8", 64, torch.float32)
        packed = pack_quantized(pair_up(values, "int8"), scales, None, "int8", 64, 64)
        rounded = ops.rounded_inputs(inputs, Rounding("int8", True), None, None)
        return (ops.quantized_linear(rounded, packed, None).double() - exact).square().mean().item()

    assert error(*smooth) < error(x, weight) / 4
