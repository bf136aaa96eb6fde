"""The linear layer over whole numbers of eight bits: every form has the bits that the reference defines, in any batch."""

import subprocess
import sys

import pytest
import torch

from penstock.kernels.cpu.tape import Pool
from penstock.kernels.integer_linear.reference import IntegerWeight, integer_linear, pack_integers, whole_numbers
from penstock.kernels.quantized_linear.rounding import Rounding, rounded_inputs

DYNAMIC = Rounding("int8", True)
SHAPES = [(1, 4), (16, 64), (37, 7), (150, 333)]
"""(out, in): ends of panels and of quads."""
ROWS = (1, 2, 3, 5, 6, 7, 41, 100)
"""Tiles of each size, an odd number of them, several blocks."""


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    return request.param


def made(shape, rule=DYNAMIC, group=None, zeros=False) -> tuple[IntegerWeight, torch.Tensor]:
    """A packed weight, the extremes among its numbers, and what it stands for in float64."""
    outputs, inputs = shape
    values = torch.randint(-128, 128, shape, dtype=torch.int8)
    values[0, : inputs // 2], values[-1] = -128, 127
    size = group or inputs
    scales = (torch.rand(outputs, -(-inputs // size)) + 0.5) / 100
    points = torch.randint(-128, 128, scales.shape, dtype=torch.int8) if zeros else None
    wide = values.double() - (0 if points is None else points.double().repeat_interleave(size, 1)[:, :inputs])
    weight = pack_integers(values, scales, points, size, rule)
    return weight, wide * scales.double().repeat_interleave(size, 1)[:, :inputs]


def inputs_of(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Of several magnitudes; zeros, and both ends of the range."""
    x = torch.randn(rows, size) * torch.logspace(-3, 3, rows)[:, None]
    x[-1] = 0.0
    x[0, 0], x[0, 1:] = -4.0, 4.0
    return x.to(dtype)


@pytest.mark.req("Q-23")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_compiled_form_has_the_references_bits(native, dtype, shape):
    """And so a row has the same bits among any others."""
    (weight, _), bias = made(shape), torch.randn(shape[0]).to(dtype)
    x = inputs_of(max(ROWS), shape[1], dtype)
    expected = integer_linear(x, weight, DYNAMIC, None, None, bias)
    for rows in ROWS:
        found = native(dtype).integer_linear(x[-rows:], weight, DYNAMIC, None, None, bias)
        assert found.dtype is dtype and torch.equal(found, expected[-rows:]), rows


@pytest.mark.parametrize(
    ("rule", "group"),
    [(Rounding("int8", True, 18), None), (DYNAMIC, 32), (DYNAMIC, 64), (Rounding("int8", True, 96), 64)],
    ids=str,
)
@pytest.mark.parametrize("zeros", [False, True])
def test_groups_and_zero_points_have_the_references_bits(native, dtype, rule, group, zeros):
    """Groups of inputs, of the weight, and of both, in which the smaller share of both counts; the last is shorter."""
    weight, _ = made((37, 250), rule, group, zeros)
    given = (inputs_of(9, 250, dtype), weight, rule, None, None, None)
    assert torch.equal(native(dtype).integer_linear(*given), integer_linear(*given))


@pytest.mark.parametrize("zero", [None, -128.0, 5.0])
@pytest.mark.parametrize("zeros", [False, True])
def test_static_scales_with_zero_points_have_the_references_bits(native, dtype, zero, zeros):
    rule, scale = Rounding("int8", False), torch.tensor([0.03])
    given = (rule, scale, None if zero is None else torch.tensor([zero]))
    weight, wide = made((37, 96), rule, None, zeros)
    x = inputs_of(9, 96, dtype)
    expected = integer_linear(x, weight, *given, None)
    assert torch.equal(native(dtype).integer_linear(x, weight, *given, None), expected)
    exact = rounded_inputs(x.float(), *given).double() @ wide.T
    torch.testing.assert_close(expected.double(), exact, rtol=1e-6 if dtype is torch.float32 else 2**-8, atol=1e-3)


@pytest.mark.parametrize(("rule", "group"), [(DYNAMIC, None), (Rounding("int8", True, 32), 64)], ids=str)
def test_the_reference_is_the_product_of_what_the_numbers_stand_for(rule, group):
    weight, wide = made((40, 250), rule, group, zeros=True)
    x = inputs_of(20, 250, torch.float32)
    exact = rounded_inputs(x, rule).double() @ wide.T
    torch.testing.assert_close(integer_linear(x, weight, rule, None, None, None).double(), exact, rtol=1e-5, atol=1e-4)


def test_packing_loses_nothing():
    for group in (None, 6, 32):
        weight, wide = made((37, 70), group=group, zeros=True)
        scales = weight.scales.transpose(1, 2).flatten(0, 1)[:37].double().repeat_interleave(weight.group, 1)[:, :70]
        torch.testing.assert_close(whole_numbers(weight) * scales, wide)


def test_the_greatest_sums_fit(native):
    """More inputs than 32 bits hold the products of: they are summed in parts, and all have the same sign."""
    inputs, rule = 40_000, Rounding("int8", False)
    values, zeros = torch.full((16, inputs), -128, dtype=torch.int8), torch.full((16, 1), 127, dtype=torch.int8)
    weight = pack_integers(values, torch.ones(16, 1), zeros, inputs, rule)
    given = (rule, torch.ones(1), torch.tensor([127.0]))
    x = torch.full((2, inputs), -1e9)
    found = native(torch.float32).integer_linear(x, weight, *given, None)
    assert torch.equal(found, torch.full((2, 16), 255.0 * 255 * inputs))
    assert torch.equal(found, integer_linear(x, weight, *given, None))


def test_what_is_no_number_makes_its_row_none(native, dtype):
    weight, _ = made((20, 64))
    x = torch.randn(4, 64).to(dtype)
    x[1, 3], x[2, 60] = float("nan"), float("inf")
    static = Rounding("int8", False)
    for given, wrong in (((DYNAMIC, None, None), (1, 2)), ((static, torch.tensor([0.01]), None), (1,))):
        found = native(dtype).integer_linear(x, weight, *given, None)
        torch.testing.assert_close(found, integer_linear(x, weight, *given, None), rtol=0, atol=0, equal_nan=True)
        assert found.isnan().all(1).nonzero().flatten().tolist() == list(wrong)
        assert found.isfinite().all(1).sum() == 4 - len(wrong)


def test_a_tape_repeats_it_and_a_call_checks_its_arguments(native):
    ops, x, (weight, _) = native(torch.float32), torch.randn(3, 64), made((40, 64))
    tape = ops.tape(lambda: ops.integer_linear(x, weight, DYNAMIC, None, None, None), Pool())
    x.copy_(torch.randn(3, 64))
    assert torch.equal(tape.run(), integer_linear(x, weight, DYNAMIC, None, None, None))
    with pytest.raises(ValueError, match="dynamic scales are found here, others are given"):
        ops.integer_linear(x, weight, DYNAMIC, torch.ones(1), None, None)
    with pytest.raises(ValueError, match="60 inputs meet a weight of 64"):
        ops.integer_linear(x[:, :60], weight, DYNAMIC, None, None, None)


def test_packing_takes_little_more_than_the_packed_weight():
    """In a process of its own, whose peak is read: another weight of eight bits, and not one of 32."""
    code = """if True:
        import resource, torch
        from penstock.kernels.integer_linear.reference import pack_integers
        from penstock.kernels.quantized_linear.rounding import Rounding
        torch.set_num_threads(1)
        values, peak = torch.ones(4096, 4096, dtype=torch.int8), lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        pack_integers(values[:64], torch.ones(64, 1), None, 4096, Rounding("int8", True))
        before = peak()
        pack_integers(values, torch.ones(4096, 1), None, 4096, Rounding("int8", True))
        print((peak() - before) / 2**10)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 1.5 * 16, "MiB"
