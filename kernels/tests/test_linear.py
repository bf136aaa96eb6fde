"""The linear layer over packed weights: against float64, and against itself in other batches."""

import pytest
import torch

from penstock.kernels.linear.reference import linear, pack_weight

SHAPES = [(1, 1), (16, 2), (17, 3), (64, 32), (100, 7), (259, 96), (40, 1100), (1050, 600)]
"""(out, in): whole tiles, ends of tiles, an odd input, several chunks of inputs."""
ROWS = (1, 2, 3, 4, 5, 6, 7, 10, 12, 13, 19, 40, 97, 200)
"""Tiles of each size, weights widened in registers and in memory, several blocks."""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-7}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def form(ops_in, dtype):
    """The operation; the reference leaves it to torch."""
    return ops_in(dtype).linear or linear


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_linear(form, dtype, shape, biased):
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    for rows in ROWS:
        x = torch.randn(rows, shape[1]).to(dtype)
        expected = x.double() @ weight.double().T + (bias.double() if biased else 0.0)
        out = form(x, pack_weight(weight), bias if biased else None, shape[0])
        assert out.dtype is dtype
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * max(1, shape[1] / 100))


@pytest.mark.parametrize("inputs", [96, 1101])
@pytest.mark.parametrize("scale", [1.0, 1e-19], ids=["plain", "subnormal"])
def test_a_rows_bits_are_the_same_among_any_others(native, dtype, inputs, scale):
    """Also where numbers, products and sums are below the smallest normal number."""
    form = native(dtype).linear
    weight, x = torch.randn(259, inputs) * scale, torch.randn(300, inputs) * scale
    x[::3] *= scale
    packed, x = pack_weight(weight.to(dtype)), x.to(dtype)
    bias = (torch.randn(259) * scale * scale).to(dtype)
    whole = form(x, packed, bias, 259)
    for first, count in ((0, 1), (5, 2), (60, 3), (71, 5), (90, 7), (40, 10), (95, 12), (100, 13), (33, 40), (7, 97)):
        assert torch.equal(form(x[first : first + count], packed, bias, 259), whole[first : first + count]), (first, count)


def test_what_is_not_finite_stays_where_it_is(form, dtype):
    for rows in (3, 30):
        weight, x = torch.randn(40, 7).to(dtype), torch.randn(rows, 7).to(dtype)
        x[1, 3], weight[2] = float("nan"), float("inf")
        out = form(x, pack_weight(weight), None, 40)
        assert out[1].isnan().all() and not out[0, :2].isnan().any() and not out[2, 3:].isnan().any()
        assert not out[:, 2].isfinite().any()
