"""The small operations against float64."""

import math

import pytest
import torch

from penstock.kernels.ops import ops_for
from penstock.kernels.prepare_kv.reference import QKNorm, Rotary
from penstock.kernels.rope.reference import rope

OPS = ops_for("cpu")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def norm64(x, weight, eps):
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rms_norm(dtype):
    x, residual, weight = torch.randn(5, 96).to(dtype) * 30, torch.randn(5, 96).to(dtype), torch.randn(96).to(dtype)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(OPS.rms_norm(x, weight, 1e-5).double(), norm64(x, weight, 1e-5), rtol=tolerance, atol=tolerance)
    out, total = OPS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(out.double(), norm64(total, weight, 1e-5), rtol=tolerance, atol=tolerance)


def test_rms_norm_of_zeros_is_zero():
    assert torch.equal(OPS.rms_norm(torch.zeros(1, 8), torch.ones(8), 1e-6), torch.zeros(1, 8))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_silu_mul(dtype):
    x = torch.randn(4, 64).to(dtype)
    gate, up = x.double().chunk(2, -1)
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(OPS.silu_mul(x).double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_rope_rotates_each_pair_by_its_angle():
    """As complex numbers: first half real, second half imaginary."""
    x, angles = torch.randn(6, 3, 10), torch.randn(6, 5)
    out = rope(x, angles.cos(), angles.sin())
    pairs = torch.complex(x[..., :5].double(), x[..., 5:].double())
    expected = pairs * torch.polar(torch.ones_like(angles, dtype=torch.float64), angles.double())[:, None]
    torch.testing.assert_close(out.double(), torch.cat((expected.real, expected.imag), -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normalised", [False, True])
def test_prepare_kv_writes_the_tokens_slots_and_no_other(normalised):
    q, k, v = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    cache = torch.full((5, 2, 2, 4, 8), math.pi)
    slots = torch.tensor([4 * 3 + 2, 4 * 1 + 0, 4 * 3 + 3])
    angles = torch.randn(3, 4)
    rotary = Rotary(angles.cos(), angles.sin())
    qk_norm = QKNorm(torch.randn(8), torch.randn(8), 1e-6) if normalised else None
    out = OPS.prepare_kv(q, k, v, cache, slots, rotary, qk_norm)
    if qk_norm is not None:
        q, k = OPS.rms_norm(q, qk_norm.q_weight, 1e-6), OPS.rms_norm(k, qk_norm.k_weight, 1e-6)
    assert torch.equal(out, rope(q, rotary.cos, rotary.sin))
    expected = torch.full_like(cache, math.pi)
    for token, (block, offset) in enumerate([(3, 2), (1, 0), (3, 3)]):
        expected[block, 0, :, offset] = rope(k, rotary.cos, rotary.sin)[token]
        expected[block, 1, :, offset] = v[token]
    assert torch.equal(cache, expected)


def test_there_are_no_kernels_for_other_devices():
    with pytest.raises(ValueError, match="'tpu'"):
        ops_for("tpu")
