"""The experts on a GPU against their reference: interpreted here, compiled on a GPU."""

import pytest
import torch

from penstock.kernels.experts.reference import experts as reference
from penstock.kernels.experts.table import ExpertTable
from penstock.kernels.experts.triton import experts
from penstock.kernels.gated_mul.reference import silu_mul

TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-2}
"""Not bfloat16: the interpreter multiplies its bits as whole numbers."""
HIDDEN, INNER, EXPERTS = 72, 40, 6


def layer(dtype: torch.dtype, device: str) -> tuple[ExpertTable, list]:
    """On the device, and as plain functions."""
    gate_up = [(torch.randn(2 * INNER, HIDDEN) / 8).to(dtype) for _ in range(EXPERTS)]
    down = [(torch.randn(HIDDEN, INNER) / 8).to(dtype) for _ in range(EXPERTS)]
    own = ([weight.to(device) for weight in weights] for weights in (gate_up, down))
    mlps = [
        lambda x, a=a, b=b: (silu_mul(x.float() @ a.float().T) @ b.float().T).to(x.dtype)
        for a, b in zip(gate_up, down, strict=True)
    ]
    return ExpertTable(*own, HIDDEN, INNER, "silu"), mlps


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("tokens", "k"), [(0, 2), (1, 1), (3, 2), (40, 3), (20, EXPERTS)])
def test_experts_equal_their_reference(triton_device, dtype, tokens, k):
    torch.manual_seed(0)
    table, mlps = layer(dtype, triton_device)
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
