"""Kernels that begin before those in front of them have ended. What their machine code waits for is in `test_aot.py`."""

import pytest
import torch
from triton import knobs

from penstock.kernels import dependent_launch
from penstock.kernels.compile_only import compile_only
from penstock.kernels.few_rows.triton import linear_add, norm_gated_linear, norm_linear
from penstock.kernels.step_state import triton as step_state
from penstock.kernels.step_state.batch import RowState, StepInputs, StepRequest

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
        assert not dependent_launch.early(META, overlaps_last=False).get("launch_pdl")


def test_inputs_are_derived_when_the_copy_before_is_over(monkeypatch):
    """The page of a step is copied; the kernel that reads it is launched as ever, and only lets the next one begin."""
    found = {}
    kernel = type("Kernel", (), {"__getitem__": lambda self, grid: lambda *_, **options: found.update(options)})()
    monkeypatch.setattr(step_state, "_prepare_inputs_kernel", kernel)
    monkeypatch.setattr(dependent_launch, "overlaps", lambda _device: True)
    ints = torch.zeros(4, dtype=torch.int32)
    state = RowState(torch.zeros(3, 8, dtype=torch.int32), ints, torch.zeros(1, 3, 2, dtype=torch.int32), ints, ints)
    inputs = StepInputs(ints, ints, torch.zeros(1, 4, dtype=torch.int64), ints, ints, ints)
    step_state.prepare_inputs(StepRequest(ints, ints, ints, ints, ints), state, inputs)
    assert found["EARLY"] and not found["launch_pdl"]


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
