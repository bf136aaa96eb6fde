"""Linear layers of few rows against their references in float64: interpreted here, compiled on a GPU."""

import pytest
import torch

from penstock.kernels.few_rows import reference, triton

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def check(device, rows, inputs, outputs, dtype, bias=True):
    x, residual = torch.randn(rows, inputs).to(dtype), torch.randn(rows, outputs).to(dtype)
    norm, weight = torch.rand(inputs) + 0.5, (torch.randn(2 * outputs, inputs) / inputs**0.5).to(dtype)
    added = torch.randn(2 * outputs).to(dtype) if bias else None
    half = None if added is None else added[:outputs].clone()

    def both(name: str, *arguments: object) -> None:
        ours = getattr(triton, name)(*(it.to(device) if isinstance(it, torch.Tensor) else it for it in arguments)).cpu()
        wide = (it.double() if isinstance(it, torch.Tensor) else it for it in arguments)
        expected = getattr(reference, name)(*wide)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), expected.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])

    both("norm_linear", x, norm, 1e-5, weight[:outputs], half)
    both("linear_add", x, weight[:outputs], half, residual)
    for activation in ("silu", "gelu_tanh"):
        both("norm_gated_linear", x, norm, 1e-5, weight, added, activation)


@pytest.mark.req("PERF-09")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("rows", "inputs", "outputs", "bias"), [(1, 512, 32, False), (16, 200, 40, True), (7, 128, 128, False)])
def test_they_equal_their_references(triton_device, monkeypatch, rows, inputs, outputs, bias, dtype):
    monkeypatch.setattr(triton, "_PROGRAMS", 2)  # as much of a tile as in a large layer
    check(triton_device, rows, inputs, outputs, dtype, bias)


def test_a_row_has_the_same_bits_in_any_company(triton_device, monkeypatch):
    import numpy as np

    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: (a[:, :, None] * b[None]).sum(1, dtype=dtype))
    x, norm, weight = torch.randn(9, 64), torch.rand(64), torch.randn(32, 64)
    given = [it.to(triton_device) for it in (x, norm, weight)]
    whole = triton.norm_linear(given[0], given[1], 1e-5, given[2], None)
    assert torch.equal(triton.norm_linear(given[0][4:5], given[1], 1e-5, given[2], None), whole[4:5])


def test_no_rows_and_too_many(triton_device):
    x, weight = torch.zeros(17, 64, device=triton_device), torch.zeros(32, 64, device=triton_device)
    assert triton.linear_add(x[:0], weight, None, x[:0, :32]).shape == (0, 32)
    with pytest.raises(ValueError, match="17 rows, where there may be 16"):
        triton.linear_add(x, weight, None, x[:, :32])


@pytest.mark.gpu
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 6144), (4096, 14336), (14336, 4096), (1024, 3072), (3072, 1024)])
def test_real_sizes_equal_their_references(inputs, outputs):
    for rows in (1, 8, 16):
        check("cuda", rows, inputs, outputs, torch.bfloat16, bias=False)
