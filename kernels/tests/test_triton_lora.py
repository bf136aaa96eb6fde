"""Low-rank adapters on a device: the kernels and the reference against merged weights, in float64."""

import pytest
import torch

from penstock.kernels.lora import device_reference
from penstock.kernels.lora import triton as kernels
from penstock.kernels.lora.device import OUTPUT_TILE, DeviceLoraBatch, DeviceLoraShelves

FORMS = {"reference": device_reference.add_lora, "triton": kernels.add_lora}
GAP = 6
"""Outputs of the layer that no projection with adapters has."""


def shelves(slots: int, max_rank: int, inputs: int, outputs: tuple[int, ...], dtype: torch.dtype, device: str):
    parts = [(sum(outputs[:at]) + at * GAP, size) for at, size in enumerate(outputs)]
    return DeviceLoraShelves(slots, max_rank, inputs, parts, dtype, torch.device(device))


def check(add_lora, device, dtype, tokens, inputs, outputs, ranks, tolerance, max_rank=None):
    """Adapter s has rank ranks[s]; the first one leaves the last projection alone."""
    torch.manual_seed(1)
    made = shelves(len(ranks), max_rank or max(ranks), inputs, outputs, dtype, device)
    width = sum(outputs) + GAP * len(outputs)
    slots = torch.randint(-1, len(ranks), (tokens + 3,), dtype=torch.int32)
    x, y = torch.randn(tokens, inputs + 16).to(dtype), torch.randn(tokens, width).to(dtype)
    expected = y.double()
    for slot, rank in enumerate(ranks):
        for at, (shelf, (offset, size)) in enumerate(zip(made, made.parts, strict=True)):
            if at == len(outputs) - 1 and slot == 0 and at:
                shelf.clear(slot)
                continue
            a, b = torch.randn(rank, inputs).to(dtype) / inputs**0.5, torch.randn(size, rank).to(dtype)
            shelf.put(slot, a.float(), b.float())
            mine = slots[:tokens] == slot
            expected[mine, offset : offset + size] += x[mine, :inputs].double() @ (b.double() @ a.double()).T
    given = y.to(device)
    add_lora(given, x.to(device)[:, :inputs], made, DeviceLoraBatch(slots.to(device)))
    given = given.cpu()
    torch.testing.assert_close(given.double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(given[slots[:tokens] < 0], y[slots[:tokens] < 0]), "tokens without an adapter"


@pytest.mark.req("LO-02", "LO-03", "LO-13")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs", "ranks"),
    [(1, 40, (24,), [4]), (9, 96, (40, 24), [3, 8, 16]), (21, 300, (OUTPUT_TILE + 8, 16), [16, 1]), (0, 32, (16,), [8])],
)
def test_each_token_gets_its_own_adapter(triton_device, form, tokens, inputs, outputs, ranks):
    device = triton_device if form == "triton" else "cpu"
    check(FORMS[form], device, torch.float32, tokens, inputs, outputs, ranks, 2e-5)


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_and_a_shelf_wider_than_a_tile(triton_device, form):
    device = triton_device if form == "triton" else "cpu"
    check(FORMS[form], device, torch.float16, 5, 160, (32,), [100, 7], 2e-2, max_rank=128)


def test_many_tokens_take_larger_tiles(triton_device, monkeypatch):
    monkeypatch.setattr(kernels, "_FEW_TOKENS", 8)
    check(kernels.add_lora, triton_device, torch.float32, 70, 48, (16, 16), [8, 8], 2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, 2048])
def test_a_real_layers_adapters(triton_device, tokens):
    check(kernels.add_lora, triton_device, torch.bfloat16, tokens, 4096, (4096, 1024, 1024), [16, 8, 64, 32], 6e-2)


@pytest.mark.req("LO-04")
@pytest.mark.parametrize("form", FORMS)
def test_what_padding_and_other_slots_hold_reaches_nobody(triton_device, form):
    """Rows of NaN without an adapter, and a slot of NaN that nobody has."""
    device = triton_device if form == "triton" else "cpu"
    made = shelves(2, 8, 32, (16,), torch.float32, device)
    made[0].put(0, torch.ones(8, 32), torch.ones(16, 8))
    made[0].put(1, torch.full((8, 32), float("nan")), torch.full((16, 8), float("nan")))
    x, y = torch.ones(4, 32, device=device), torch.zeros(4, 16 + GAP, device=device)
    x[2:] = float("nan")
    FORMS[form](y, x, made, DeviceLoraBatch(torch.tensor([0, 0, -1, -1], dtype=torch.int32, device=device)))
    assert bool((y[:2, :16] == 8 * 32).all()) and not y[2:].any() and not y[:, 16:].any()


@pytest.mark.req("LO-04", "LO-07")
def test_a_slot_is_used_again_in_place_without_a_residue():
    made = shelves(2, 24, 8, (5, 3), torch.float32, "cpu")
    before = made.a.data_ptr(), made.b.data_ptr()
    made[1].put(0, torch.ones(24, 8), torch.ones(3, 24))
    assert not made.a[:, : made.width].any() and not made.b[:, :5].any() and not made.a[1].any()
    made[1].put(0, torch.ones(2, 8), torch.ones(3, 2))
    assert made.a.sum() == 2 * 8 and made.b.sum() == 3 * 2
    made[1].clear(0)
    assert not made.a.any() and not made.b.any() and before == (made.a.data_ptr(), made.b.data_ptr())
    assert made.width == 32 and sum(shelf.nbytes for shelf in made) == made.a.nbytes + made.b.nbytes
