"""RMSNorm's Triton kernels: against the reference in float64, interpreted here and compiled on a GPU."""

import pytest
import torch

from penstock.kernels.rms_norm import reference
from penstock.kernels.rms_norm.triton import add_rms_norm, rms_norm


@pytest.mark.req("PERF-09")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 64), (5, 80), (3, 4, 96), (2, 1536), (0, 64)])
def test_norms_equal_their_reference(triton_device, shape, dtype):
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    x, residual = (torch.randn(shape).to(dtype) for _ in range(2))
    weight = torch.randn(shape[-1])
    device = triton_device
    out = rms_norm(x.to(device), weight.to(device), 1e-5)
    torch.testing.assert_close(out.cpu().double(), reference.rms_norm(x.double(), weight, 1e-5), atol=tolerance, rtol=tolerance)
    normed, total = add_rms_norm(x.to(device), residual.to(device), weight.to(device), 1e-5)
    # The interpreter cuts bfloat16 off where a GPU rounds.
    torch.testing.assert_close(total.cpu(), x + residual, atol=0, rtol=2**-7 if dtype is torch.bfloat16 else 0)
    expected = reference.rms_norm((x + residual).double(), weight, 1e-5)
    torch.testing.assert_close(normed.cpu().double(), expected, atol=tolerance, rtol=tolerance)
