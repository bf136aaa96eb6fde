"""The linear layer over weights of eight and four bits: against float64, and against itself in other batches."""

import pytest
import torch

from penstock.kernels.cpu.tape import Pool
from penstock.kernels.ops import REFERENCE
from penstock.kernels.quantized_linear.reference import QuantizedWeight, dequantized, pack_quantized, pair_up, quantize

SHAPES = [(1, 64), (16, 32), (17, 96), (100, 64), (259, 352), (40, 1120)]
"""(out, in): whole panels and ends of panels."""
ROWS = (1, 2, 3, 4, 5, 7, 64, 67, 130)
"""Tiles of each size, several blocks."""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-7}
SCHEMES = [(8, 0, torch.float32), (8, 32, torch.bfloat16), (4, 32, torch.bfloat16), (4, 32, torch.float32), (4, 0, torch.float32)]
"""Bits, inputs of a group (0: all), scales."""


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request):
    return request.param


@pytest.fixture(params=SCHEMES, ids=str)
def scheme(request):
    return request.param


def made(weight: torch.Tensor, scheme) -> tuple[QuantizedWeight, torch.Tensor]:
    """A packed weight, and what it stands for in float64."""
    bits, group, scale_dtype = scheme
    inputs = weight.shape[1]
    values, scales = quantize(weight, bits, group or inputs, scale_dtype)
    packed = pack_quantized(pair_up(values, bits), scales, bits, group or inputs + inputs % 2, inputs)
    return packed, values.double() * scales.double().repeat_interleave(group or inputs, 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_quantized_linear(ops_in, dtype, scheme, shape, biased):
    form = ops_in(dtype).quantized_linear
    packed, weight = made(torch.randn(shape), scheme)
    bias = torch.randn(shape[0]).to(dtype)
    for rows in ROWS:
        x = torch.randn(rows, shape[1]).to(dtype)
        expected = x.double() @ weight.T + (bias.double() if biased else 0.0)
        out = form(x, packed, bias if biased else None)
        assert out.dtype is dtype
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * max(1, shape[1] / 100))


@pytest.mark.parametrize("bits", [4, 8])
def test_an_odd_number_of_inputs_with_one_scale(ops_in, dtype, bits):
    packed, weight = made(torch.randn(33, 7), (bits, 0, torch.float32))
    x = torch.randn(5, 7).to(dtype)
    out = ops_in(dtype).quantized_linear(x, packed, None)
    torch.testing.assert_close(out.double(), x.double() @ weight.T, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_rows_bits_are_the_same_among_any_others(native, dtype, scheme):
    form = native(dtype).quantized_linear
    packed, _ = made(torch.randn(259, 352), scheme)
    x, bias = torch.randn(150, 352).to(dtype), torch.randn(259).to(dtype)
    whole = form(x, packed, bias)
    for first, count in ((0, 1), (5, 2), (60, 3), (71, 5), (90, 7), (7, 97)):
        assert torch.equal(form(x[first : first + count], packed, bias), whole[first : first + count]), (first, count)


def test_a_tape_repeats_it(native, dtype):
    ops = native(dtype)
    packed, _ = made(torch.randn(40, 64), SCHEMES[2])
    x = torch.randn(3, 64).to(dtype)
    tape = ops.tape(lambda: ops.quantized_linear(x, packed, None), Pool())
    x.copy_(torch.randn(3, 64))
    assert torch.equal(tape.run(), ops.quantized_linear(x, packed, None))


@pytest.mark.parametrize(("bits", "group"), [(8, 32), (4, 32)])
def test_numbers_are_the_nearest_and_within_their_bits(bits, group):
    weight = torch.randn(20, 96)
    values, scales = quantize(weight, bits, group, torch.float32)
    error = (values.float() * scales.repeat_interleave(group, 1) - weight).abs()
    assert (error <= scales.repeat_interleave(group, 1) * 0.5001).all()
    assert values.min() >= -(2 ** (bits - 1)) and values.max() == 2 ** (bits - 1) - 1


def test_packing_loses_nothing(scheme):
    packed, weight = made(torch.randn(37, 96), scheme)
    assert torch.equal(dequantized(packed).double(), weight.float().double())


def test_zeros_stay_zeros_and_what_is_not_finite_shows_in_its_scale():
    weight = torch.zeros(2, 64)
    weight[1, 40] = float("nan")
    values, scales = quantize(weight, 4, 32, torch.bfloat16)
    assert torch.equal(scales[0], torch.ones(2, dtype=torch.bfloat16)) and not values[0].any()
    assert scales[1].isnan().tolist() == [False, True]


def test_four_bits_take_less_than_a_third_of_sixteen():
    packed, _ = made(torch.randn(512, 1024), (4, 32, torch.bfloat16))
    assert packed.nbytes <= 0.30 * 512 * 1024 * 2
    assert REFERENCE.quantized_linear(torch.ones(1, 1024), packed, None).shape == (1, 512)
