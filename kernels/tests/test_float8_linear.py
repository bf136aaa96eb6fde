"""Linear layers whose weight and inputs are E4M3: Triton's rounding bit by bit, and torch's product, which a CPU has too."""

import pytest
import torch
from test_rounding import inputs

from penstock.kernels.float8_linear import triton as on_device
from penstock.kernels.float8_linear.reference import (
    Float8Weight,
    float8_linear,
    float8_numbers,
    pack_float8,
    takes,
)
from penstock.kernels.ops import triton_ops
from penstock.kernels.quantized_linear.reference import quantize
from penstock.kernels.quantized_linear.rounding import Rounding

RULES = [Rounding("float8", True), Rounding("float8", True, power_of_two=True), Rounding("float8", False)]


def given(rule: Rounding) -> torch.Tensor | None:
    return None if rule.dynamic else torch.tensor([0.37])


def weight(outputs: int, size: int) -> Float8Weight:
    torch.manual_seed(0)
    return pack_float8(*quantize(torch.randn(outputs, size), "e4m3", size, torch.float32))


@pytest.mark.req("Q-23")
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 48), (torch.bfloat16, 2064)], ids=str)
def test_tritons_rounding_has_the_bits_of_the_reference(triton_device, dtype, size, rule):
    x, scale = inputs(dtype, size), given(rule)
    found = on_device.float8_numbers(x.to(triton_device), rule, None if scale is None else scale.to(triton_device))
    numbers, scales = float8_numbers(x, rule, scale)
    torch.testing.assert_close(found[1].cpu(), scales, rtol=0, atol=0, equal_nan=True)
    bits = [part.cpu().view(torch.uint8) for part in (found[0], numbers)]
    assert torch.equal(*(torch.where(part & 0x7F == 0x7F, 0x7F, part) for part in bits)), "but for the sign of what is no number"


def test_rows_may_lie_apart(triton_device):
    wide = torch.randn(3, 96)
    for part in (wide[:, 16:64], wide.T[:48].T):
        (numbers, scales), expected = (
            on_device.float8_numbers(part.to(triton_device), RULES[0], None),
            float8_numbers(part, RULES[0], None),
        )
        assert torch.equal(numbers.cpu().view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(scales.cpu(), expected[1])


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 20])
@pytest.mark.parametrize("biased", [False, True])
def test_torchs_product_is_the_references(triton_device, biased, rows, rule):
    packed, x = weight(32, 48), torch.randn(rows, 48).bfloat16()
    bias = torch.randn(32).bfloat16() if biased else None
    expected = float8_linear(x, packed, rule, given(rule), bias)
    there = [None if part is None else part.to(triton_device) for part in (x, *packed, given(rule), bias)]
    found = on_device.float8_linear(there[0], Float8Weight(*there[1:3]), rule, *there[3:])
    assert found.dtype is torch.bfloat16 and found.shape == (rows, 32)
    torch.testing.assert_close(found.cpu(), expected, rtol=2**-7, atol=1e-2)


def test_which_layers_meet_in_eight_bits():
    dynamic = RULES[0]
    assert takes("e4m3", dynamic, 64, 32, 64) and takes("e4m3", dynamic, 128, 32, 64)
    assert not takes("e4m3", None, 64, 32, 64), "inputs keep their dtype"
    assert not takes("e4m3", dynamic, 32, 32, 64), "groups"
    assert not takes("e4m3", Rounding("float8", True, 32), 64, 32, 64), "groups of inputs"
    assert not takes("int8", Rounding("int8", True), 64, 32, 64)
    assert not takes("e4m3", dynamic, 64, 24, 64) and not takes("e4m3", dynamic, 40, 32, 40), "what instructions do not take"


def test_only_gpus_that_have_the_instructions_use_them():
    assert triton_ops(torch.bfloat16, (8, 9)).float8_linear is triton_ops(torch.bfloat16, (9, 0)).float8_linear is not None
    assert triton_ops(torch.bfloat16, (8, 6)).float8_linear is triton_ops(torch.float16, (9, 0)).float8_linear is None
