"""The torch references on a GPU, against themselves in float64 on the CPU: they are what every GPU kernel is compared to."""

import pytest
import torch

from penstock.kernels.gated_mul.reference import gelu_tanh_mul, silu_mul
from penstock.kernels.rms_norm.reference import add_rms_norm, rms_norm

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_references_compute_the_same_on_a_gpu(dtype):
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    x, weight = torch.randn(33, 192).to(dtype), torch.randn(192)
    pairs = [
        (rms_norm(x.cuda(), weight.cuda(), 1e-6), rms_norm(x.double(), weight.double(), 1e-6)),
        (silu_mul(x.cuda()), silu_mul(x.double())),
        (gelu_tanh_mul(x.cuda()), gelu_tanh_mul(x.double())),
        (
            add_rms_norm(x.cuda(), x.cuda(), weight.cuda(), 1e-6)[0],
            add_rms_norm(x.double(), x.double(), weight.double(), 1e-6)[0],
        ),
    ]
    for there, here in pairs:
        torch.testing.assert_close(there.cpu().double(), here, atol=tolerance, rtol=tolerance)
