"""The linear layer over weights of eight and four bits: against float64, and against itself in other batches."""

import pytest
import torch

from penstock.kernels.cpu.tape import Pool
from penstock.kernels.ops import REFERENCE
from penstock.kernels.quantized_linear.reference import (
    E2M1,
    QuantizedWeight,
    dequantized,
    pack_quantized,
    pair_up,
    quantize,
)

SHAPES = [(1, 64), (16, 32), (17, 96), (100, 64), (259, 352), (40, 1120), (24, 112), (8, 18)]
"""(out, in): whole panels and ends of panels, whole groups and shorter last ones."""
ROWS = (1, 2, 3, 4, 5, 7, 64, 67, 130)
"""Tiles of each size, several blocks."""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-7}
SCHEMES = [
    ("int8", 0, torch.float32),
    ("int8", 32, torch.bfloat16),
    ("int4", 32, torch.bfloat16),
    ("int4", 32, torch.float32),
    ("int4", 0, torch.float32),
    ("e4m3", 0, torch.float32),
    ("e4m3", 128, torch.float32),
]
"""Number, inputs of a group (0: all), scales."""


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
    number, group, scale_dtype = scheme
    inputs = weight.shape[1]
    values, scales = quantize(weight, number, group or inputs, scale_dtype)
    packed = pack_quantized(pair_up(values, number), scales, None, number, group or inputs, inputs)
    wide = values.view(torch.float8_e4m3fn).double() if number == "e4m3" else values.double()
    return packed, wide * scales.double().repeat_interleave(group or inputs, 1)[:, :inputs]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [pytest.param(False, marks=pytest.mark.slow), True])
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


@pytest.mark.parametrize("number", ["int4", "int8"])
def test_an_odd_number_of_inputs_with_one_scale(ops_in, dtype, number):
    packed, weight = made(torch.randn(33, 7), (number, 0, torch.float32))
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


@pytest.mark.parametrize(("number", "size"), [("int8", 8), ("int4", 4)])
def test_numbers_are_the_nearest_and_within_their_bits(number, size):
    weight, group = torch.randn(20, 96), 32
    values, scales = quantize(weight, number, group, torch.float32)
    error = (values.float() * scales.repeat_interleave(group, 1) - weight).abs()
    assert (error <= scales.repeat_interleave(group, 1) * 0.5001).all()
    assert values.min() >= -(2 ** (size - 1)) and values.max() == 2 ** (size - 1) - 1


@pytest.mark.parametrize(("group", "outputs"), [(200, None), (200, 1), (128, 128)])
def test_eight_bit_floats_are_those_of_torch_in_their_blocks(group, outputs):
    """Each block by itself, the last ones smaller; the greatest of each becomes 448 exactly."""
    weight = torch.randn(150, 200) * torch.logspace(-4, 3, 150)[:, None]
    values, scales = quantize(weight, "e4m3", group, torch.float32, outputs)
    assert values.shape == weight.shape and scales.shape == (150, -(-200 // group))
    for rows in torch.arange(150).split(outputs or 150):
        for number, columns in enumerate(torch.arange(200).split(group)):
            block, found = weight[rows][:, columns], values[rows][:, columns].view(torch.float8_e4m3fn)
            scale = block.abs().max() / 448
            assert torch.equal(scales[rows, number], scale.expand(len(rows)))
            assert torch.equal(found.view(torch.int8), (block / scale).to(torch.float8_e4m3fn).view(torch.int8))
            assert found.float().abs().max() == 448


@pytest.mark.req("Q-04")
def test_finer_scales_lose_less_of_a_weight_with_outliers():
    weight = torch.randn(64, 256)
    weight[5, 7], weight[40] = 60.0, weight[40] * 8

    def error(scaled: torch.Tensor, group: int) -> float:
        values, scales = quantize(scaled, "int8", group, torch.float32)
        return float((values * scales.repeat_interleave(group, 1) - scaled).square().mean())

    tensor, channel, groups = error(weight.view(1, -1), weight.numel()), error(weight, 256), error(weight, 32)
    assert groups < channel < tensor


@pytest.mark.req("Q-07")
def test_zero_points_stand_for_exact_zeros_and_packing_is_undone():
    codes, zeros = torch.randint(-8, 8, (20, 64), dtype=torch.int8), torch.randint(-8, 8, (20, 2), dtype=torch.int8)
    codes[:, ::3] = zeros.repeat_interleave(32, 1)[:, ::3]
    packed = pack_quantized(pair_up(codes, "int4"), torch.full((20, 2), 0.3), zeros, "int4", 32, 64)
    found = dequantized(packed)
    assert not found[:, ::3].any()
    assert torch.equal((found / torch.tensor(0.3)).round().to(torch.int8) + zeros.repeat_interleave(32, 1), codes)


def test_packing_loses_nothing(scheme):
    packed, weight = made(torch.randn(37, 96), scheme)
    assert torch.equal(dequantized(packed).double(), weight.float().double())


def test_zeros_stay_zeros_and_what_is_not_finite_shows_in_its_scale():
    weight = torch.zeros(2, 64)
    weight[1, 40] = float("nan")
    values, scales = quantize(weight, "int4", 32, torch.bfloat16)
    assert torch.equal(scales[0], torch.ones(2, dtype=torch.bfloat16)) and not values[0].any()
    assert scales[1].isnan().tolist() == [False, True]


def test_four_bits_take_less_than_a_third_of_sixteen():
    packed, _ = made(torch.randn(512, 1024), ("int4", 32, torch.bfloat16))
    assert packed.nbytes <= 0.30 * 512 * 1024 * 2
    assert REFERENCE.quantized_linear(torch.ones(1, 1024), packed, None).shape == (1, 512)


def stored(number: str, outputs: int, inputs: int, group: int, scale_dtype: torch.dtype, zeros: bool):
    """A packed weight of any numbers that its format has, and what it stands for in float64."""
    codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    if number == "int4":
        codes = (codes << 4) >> 4
    if number == "e4m3":
        codes[(codes & 0x7F) == 0x7F] = 0  # not a number
    values = {
        "int8": lambda: codes.double(),
        "int4": lambda: codes.double(),
        "e4m3": lambda: codes.view(torch.float8_e4m3fn).double(),
        "e2m1": lambda: E2M1[(codes & 15).long()].double(),
    }[number]()
    groups = -(-inputs // group)
    scales = (torch.rand(outputs, groups) * 0.02 + 0.01).to(scale_dtype)
    points = torch.randint(-8, 8, (outputs, groups), dtype=torch.int8) if zeros else None
    weight = pack_quantized(pair_up(codes, number), scales, points, number, group, inputs)
    if points is not None:
        values = values - points.repeat_interleave(group, 1)[:, :inputs]
    return weight, values * scales.double().repeat_interleave(group, 1)[:, :inputs]


STORED = [
    ("int4", 32, torch.float16, True),
    ("int4", 128, torch.bfloat16, True),
    ("int8", 64, torch.float32, True),
    ("e4m3", 128, torch.float32, False),
    ("e4m3", 352, torch.bfloat16, False),
    ("e2m1", 32, torch.bfloat16, False),
]
"""Number, group, scales, whether there are zero points: what quantized checkpoints hold."""


@pytest.mark.parametrize(("number", "group", "scale_dtype", "zeros"), STORED, ids=str)
@pytest.mark.parametrize("shape", [(16, 352), (45, 320)], ids=str)
def test_numbers_of_checkpoints(ops_in, dtype, number, group, scale_dtype, zeros, shape):
    """Also where the last group is shorter."""
    form = ops_in(dtype).quantized_linear
    packed, weight = stored(number, *shape, group, scale_dtype, zeros)
    scale = weight.abs().max().item()
    for rows in (1, 3, 4, 66):
        x = torch.randn(rows, shape[1]).to(dtype)
        tolerance = TOLERANCE[dtype]
        expected = x.double() @ weight.T
        torch.testing.assert_close(
            form(x, packed, None).double(), expected, rtol=tolerance, atol=tolerance * scale * shape[1] ** 0.5
        )
    assert torch.equal(dequantized(packed), weight.float())


@pytest.mark.parametrize(("number", "group", "scale_dtype", "zeros"), STORED, ids=str)
def test_numbers_of_checkpoints_give_a_row_the_same_bits_among_any_others(native, dtype, number, group, scale_dtype, zeros):
    form = native(dtype).quantized_linear
    packed, _ = stored(number, 45, 352, group, scale_dtype, zeros)
    x = torch.randn(70, 352).to(dtype)
    whole = form(x, packed, None)
    for first, count in ((0, 1), (5, 2), (60, 3), (7, 21)):
        assert torch.equal(form(x[first : first + count], packed, None), whole[first : first + count]), (first, count)


@pytest.mark.parametrize("number", ["e4m3", "e2m1"])
def test_every_code_is_read_exactly(ops_in, dtype, number):
    """An identity matrix shows each number by itself, those below the normal range too."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int8).view(16, 16).clone()
    codes[(codes & 0x7F) == 0x7F] = 0
    packed = pack_quantized(pair_up(codes, number), torch.ones(16, 1), None, number, 16, 16)
    values = codes.view(torch.float8_e4m3fn).float() if number == "e4m3" else E2M1[(codes & 15).long()]
    out = ops_in(dtype).quantized_linear(torch.eye(16, dtype=dtype), packed, None)
    assert torch.equal(out.float().T, values)


def test_a_group_that_ends_within_a_step_is_refused():
    with pytest.raises(ValueError, match="groups of 20 inputs are no whole steps of 8"):
        pack_quantized(pair_up(torch.zeros(16, 40, dtype=torch.int8), "int4"), torch.ones(16, 2), None, "int4", 20, 40)
