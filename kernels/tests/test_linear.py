"""The linear layer over packed weights: against float64, and against itself in other batches."""

import pytest
import torch

from penstock.kernels.linear.reference import linear, pack_weight

SHAPES = [(1, 1), (16, 2), (17, 3), (64, 32), (100, 7), (259, 96)]
"""(out, in): whole tiles, ends of tiles, an odd input."""


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def form(ops_in):
    """The operation; the reference's where a form leaves it to torch."""
    return ops_in(torch.bfloat16).linear or linear


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_linear(form, shape, biased):
    weight, bias = torch.randn(shape).bfloat16(), torch.randn(shape[0]).bfloat16()
    for rows in (1, 2, 5, 6, 7, 12, 13, 97):
        x = torch.randn(rows, shape[1]).bfloat16()
        expected = x.double() @ weight.double().T + (bias.double() if biased else 0.0)
        out = form(x, pack_weight(weight), bias if biased else None, shape[0])
        assert out.dtype is torch.bfloat16
        torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=2**-7)


def test_a_rows_bits_are_the_same_among_any_others(native):
    if (form := native(torch.bfloat16).linear) is None:
        pytest.skip("this instruction set has no linear layer")
    packed, x = pack_weight(torch.randn(259, 96).bfloat16()), torch.randn(300, 96).bfloat16()
    whole = form(x, packed, None, 259)
    for first, count in ((0, 1), (5, 2), (90, 7), (95, 12), (100, 13), (7, 97)):
        assert torch.equal(form(x[first : first + count], packed, None, 259), whole[first : first + count]), (first, count)


def test_what_is_not_finite_stays_where_it_is(form):
    weight, x = torch.randn(40, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    x[1, 3], weight[2] = float("nan"), float("inf")
    out = form(x, pack_weight(weight), None, 40)
    assert out[1].isnan().all() and not out[0, :2].isnan().any() and not out[2, 3:].isnan().any()
    assert not out[:, 2].isfinite().any()
