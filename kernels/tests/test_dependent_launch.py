"""Kernels that begin before those in front of them have ended. What their machine code waits for is in `test_aot.py`."""

import pytest
import torch
from triton import knobs

from penstock.kernels import dependent_launch
from penstock.kernels.compile_only import compile_only
from penstock.kernels.few_rows.triton import linear_add, norm_gated_linear, norm_linear

META = torch.device("meta")


@pytest.mark.parametrize(
    ("arch", "interpreted", "overlaps"), [("sm_90", False, True), ("sm_89", False, False), ("sm_90", True, False)]
)
def test_launches_overlap_from_hopper_on_and_never_in_the_interpreter(monkeypatch, arch, interpreted, overlaps):
    monkeypatch.setattr(knobs.runtime, "interpret", interpreted)
    monkeypatch.setattr(dependent_launch, "overlaps", dependent_launch.overlaps.__wrapped__)
    with compile_only(arch):
        expected = {"EARLY": True, "launch_pdl": True} if overlaps else {"EARLY": False}
        assert dependent_launch.early(META) == expected


@pytest.mark.gpu
def test_a_chain_of_kernels_gives_the_same_bits_however_it_is_launched(monkeypatch):
    """Each kernel reads what the one before it has written, in memory that kernels before have used: also in a graph."""
    size = 2048
    x, norm = (torch.randn(8, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    norm = norm[0].float()
    up, down, square = (
        torch.randn(rows, size, device="cuda", dtype=torch.bfloat16) / size**0.5 for rows in (2 * size, size, size)
    )

    def chain() -> torch.Tensor:
        stream = x
        for _ in range(20):
            stream = linear_add(norm_linear(stream, norm, 1e-5, square, None), down, None, stream)
            stream = linear_add(norm_gated_linear(stream, norm, 1e-5, up, None, "silu"), down, None, stream)
        return stream

    with monkeypatch.context() as patch:
        patch.setattr(dependent_launch, "overlaps", lambda _device: False)
        expected = chain()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        chain()
        with torch.cuda.graph(graph, stream=stream):
            found = chain()
    for _ in range(50):
        assert torch.equal(chain(), expected)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)
