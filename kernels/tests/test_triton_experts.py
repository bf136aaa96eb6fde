"""The experts on a GPU against their reference: interpreted here, compiled on a GPU."""

import pytest
import torch

from penstock.kernels.experts.reference import experts as reference
from penstock.kernels.experts.table import ExpertTable
from penstock.kernels.experts.triton import experts
from penstock.kernels.gated_mul.reference import clamped_swiglu, silu_mul

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2}
"""Not bfloat16: the interpreter multiplies its bits as whole numbers."""
HIDDEN, INNER, EXPERTS = 72, 40, 6


def layer(dtype: torch.dtype, device: str, clamp: tuple[float, float] | None = None) -> tuple[ExpertTable, list]:
    """On the device, and as plain functions; with biases where the gate is clamped."""
    gate_up = [(torch.randn(2 * INNER, HIDDEN) / 8).to(dtype) for _ in range(EXPERTS)]
    down = [(torch.randn(HIDDEN, INNER) / 8).to(dtype) for _ in range(EXPERTS)]
    first, last = ([torch.randn(size).to(dtype) * (clamp is not None) for _ in gate_up] for size in (2 * INNER, HIDDEN))
    own = [[tensor.to(device) for tensor in tensors] for tensors in (gate_up, down, first, last)]
    gated = silu_mul if clamp is None else lambda x: clamped_swiglu(x, *clamp)
    mlps = [
        lambda x, a=a, b=b, c=c, d=d: (gated(x.float() @ a.float().T + c.float()) @ b.float().T + d.float()).to(x.dtype)
        for a, b, c, d in zip(gate_up, down, first, last, strict=True)
    ]
    if clamp is None:
        return ExpertTable(own[0], own[1], HIDDEN, INNER, "silu"), mlps
    return ExpertTable(own[0], own[1], HIDDEN, INNER, "clamped_swiglu", clamp, (own[2], own[3])), mlps


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("tokens", "k"), [(0, 2), (1, 1), (3, 2), (40, 3), (20, EXPERTS)])
@pytest.mark.parametrize("clamp", [None, (1.7, 0.6)], ids=["plain", "clamped-biased"])
def test_experts_equal_their_reference(triton_device, dtype, tokens, k, clamp):
    torch.manual_seed(0)
    table, mlps = layer(dtype, triton_device, clamp)
    x, weights = torch.randn(tokens, HIDDEN).to(dtype), torch.rand(tokens, k)
    ids = torch.rand(tokens, EXPERTS).argsort(1)[:, :k].int()
    out = experts(x.to(triton_device), ids.to(triton_device), weights.to(triton_device), table).cpu()
    torch.testing.assert_close(out, reference(x, ids, weights, mlps), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_one_expert_may_get_all_tokens_and_the_others_are_not_read(triton_device):
    torch.manual_seed(0)
    table, mlps = layer(torch.float32, triton_device)
    for expert in (0, 1, 2, 4, 5):
        table.gate_up_at[expert] = table.down_at[expert] = 0  # to read from there ends the process
    x, weights, ids = torch.randn(35, HIDDEN), torch.rand(35, 1), torch.full((35, 1), 3, dtype=torch.int32)
    out = experts(x.to(triton_device), ids.to(triton_device), weights.to(triton_device), table).cpu()
    torch.testing.assert_close(out, reference(x, ids, weights, mlps), rtol=2e-5, atol=2e-5)
