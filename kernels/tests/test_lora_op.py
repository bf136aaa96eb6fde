"""Low-rank adapters on top of a linear layer, against float64, in each form that a CPU has."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from penstock.kernels.lora.batch import RANK_STEP, LoraBatch, LoraShelf
from penstock.kernels.ops import Ops

SLOTS, MAX_RANK = 3, 40
SHAPES = [(96, (40, 24)), (97, (64, 130, 7)), (3, (1,))]
"""Inputs, and the outputs of each projection: whole tiles, ends of tiles, inputs without a neighbour."""


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def ops(request, ops_in):
    """(operations, dtype)."""
    return ops_in(request.param), request.param


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)


@dataclass
class Layer:
    """With the adapter of slot s of rank ranks[s]; the last projection has none in slot 0 where there are others."""

    ops: Ops
    dtype: torch.dtype
    inputs: int
    outputs: tuple[int, ...]
    ranks: tuple[int, ...]
    max_rank: int = MAX_RANK

    def __post_init__(self):
        self.parts = [(sum(self.outputs[:at]), size) for at, size in enumerate(self.outputs)]
        self.shelves = self.ops.lora_shelves(SLOTS, self.max_rank, self.inputs, self.parts, self.dtype, torch.device("cpu"))
        self.deltas = torch.zeros(SLOTS, self.inputs, sum(self.outputs), dtype=torch.float64)
        for at, (shelf, (offset, size)) in enumerate(zip(self.shelves, self.parts, strict=True)):
            for slot, rank in enumerate(self.ranks):
                if at and slot == 0 and at == len(self.outputs) - 1:
                    shelf.clear(slot)
                    continue
                a, b = (torch.randn(shape).to(self.dtype).float() for shape in ((rank, self.inputs), (size, rank)))
                shelf.put(slot, a, b)
                self.deltas[slot, :, offset : offset + size] = a.double().T @ b.double().T

    def add(self, y, x, slots):
        """What is made of y."""
        made, batch = y.clone(), LoraBatch(SLOTS, len(slots))
        batch.fill(np.asarray(slots))
        self.ops.add_lora(made, x, self.shelves, batch)
        return made

    def tokens(self, count):
        """x and y."""
        return torch.randn(count, self.inputs).to(self.dtype), torch.randn(count, sum(self.outputs)).to(self.dtype)


@pytest.mark.req("LO-02", "LO-03", "LO-13")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ranks", [(3, 8, 16), (1, 40, 17)], ids=str)
def test_each_token_gets_its_own_adapter_and_those_without_are_untouched(ops, shape, ranks):
    layer = Layer(*ops, *shape, ranks)
    for slots in ([0, -1, 2, 2, 1, 0, -1, 1, 1], [2], np.random.default_rng(0).integers(-1, SLOTS, 200), np.full(130, 1)):
        x, y = layer.tokens(len(slots))
        given, slots = layer.add(y, x, slots), torch.tensor(slots)
        adapted = slots >= 0
        delta = torch.einsum("ni,nio->no", x[adapted].double(), layer.deltas[slots[adapted]])
        # Numbers cancel: errors are as large as what was added up, not as what is left.
        tolerance = (2**-7 if layer.dtype is torch.bfloat16 else 1e-6) * float(delta.abs().max() + y.abs().max())
        torch.testing.assert_close(given[adapted].double(), y[adapted].double() + delta, rtol=0, atol=tolerance)
        assert torch.equal(given[~adapted].view(torch.uint8), y[~adapted].view(torch.uint8))
        if len(layer.parts) > 1:
            alone = slots == 0, slice(layer.parts[-1][0], None)
            assert torch.equal(given[alone], y[alone]), "a projection that the adapter leaves alone"


@pytest.mark.req("LO-01")
@pytest.mark.parametrize("rank", [1, 4, 8, 20, 33])
def test_a_tokens_bits_do_not_depend_on_the_others(ops, rank):
    layer = Layer(*ops, 96, (40, 24), (rank,) * SLOTS)
    slots = np.random.default_rng(rank).integers(-1, SLOTS, 300)
    x, y = layer.tokens(300)
    whole = layer.add(y, x, slots)
    for count in (1, 2, 3, 4, 5, 6, 7, 16, 33, 128):
        part = slice(100, 100 + count)
        assert torch.equal(layer.add(y[part], x[part], slots[part]), whole[part]), count
    order = torch.randperm(300)
    assert torch.equal(layer.add(y[order], x[order], slots[order]), whole[order])
    together = layer.add(y, x, np.full(300, 1))
    assert torch.equal(together[slots == 1], whole[slots == 1]), "tokens that lie side by side, and such that do not"


@pytest.mark.req("LO-01", "LO-03")
def test_what_is_not_finite_stays_where_it_is(ops):
    layer = Layer(*ops, 96, (40, 24), (5, 8, 16))
    slots = np.random.default_rng(0).integers(-1, SLOTS, 50)
    x, y = layer.tokens(50)
    expected = layer.add(y, x, slots)
    x[7], y[9] = float("nan"), float("inf")
    others = [token for token in range(50) if token not in (7, 9)]
    assert torch.equal(layer.add(y, x, slots)[others], expected[others])


@pytest.mark.req("LO-04", "LO-07")
def test_a_slot_is_used_again_without_a_residue_and_a_wide_shelf_changes_nothing(ops):
    narrow, reused, wide = (Layer(*ops, 96, (40,), (8,), max_rank) for max_rank in (8, 64, 64))
    shelves = [next(iter(layer.shelves)) for layer in (narrow, reused, wide)]
    shelves[1].put(0, torch.randn(64, 96), torch.randn(40, 64))
    before = shelves[1].a.data_ptr(), shelves[1].b.data_ptr()
    a, b = torch.randn(5, 96), torch.randn(40, 5)
    for shelf in shelves:
        shelf.put(0, a, b)
    x, y = narrow.tokens(9)
    expected = narrow.add(y, x, np.zeros(9, int))
    assert all(torch.equal(layer.add(y, x, np.zeros(9, int)), expected) for layer in (reused, wide))
    assert (shelves[1].a.data_ptr(), shelves[1].b.data_ptr()) == before, "nothing is allocated when adapters come and go"
    assert torch.equal(shelves[1].a[0], shelves[2].a[0]) and torch.equal(shelves[1].b[0], shelves[2].b[0])
    shelves[1].clear(0)
    assert torch.equal(reused.add(y, x, np.zeros(9, int)), y) and not shelves[1].a[0].any() and not shelves[1].b[0].any()


@pytest.mark.req("LO-22")
def test_memory_is_what_slots_and_ranks_say(native):
    assert LoraShelf.empty(3, 10, 96, 0, 40).nbytes == 3 * 2 * RANK_STEP * (96 + 40) * 4
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        (shelf,) = native(dtype).lora_shelves(3, 10, 96, [(0, 40)], dtype, torch.device("cpu"))
        assert shelf.nbytes == 3 * (16 * 96 + 48 * 10) * size


@pytest.mark.req("LO-10", "LO-26")
def test_a_batch_is_its_tokens_by_slot_in_arrays_that_stay():
    batch = LoraBatch(SLOTS, 300)
    before, rng = batch.layout, np.random.default_rng(0)
    for slots in (np.array([2, -1, 0, 2]), np.array([-1, -1]), np.full(300, 1), rng.integers(-1, SLOTS, 257)):
        batch.fill(slots)
        found = {slot: tokens.tolist() for slot, tokens in batch.segments()}
        assert found == {slot: np.flatnonzero(slots == slot).tolist() for slot in range(SLOTS) if (slots == slot).any()}
        assert batch.layout == before == (batch.order.ctypes.data, batch.starts.ctypes.data, SLOTS)
    with pytest.raises(ValueError, match="size"):
        batch.fill(np.array([SLOTS]))
    batch.clear()
    assert batch.segments() == []


def test_outputs_that_cannot_be_added_to_are_refused(native):
    layer = Layer(native(torch.float32), torch.float32, 96, (40, 24), (5, 8, 16))
    x, y = layer.tokens(4)
    for wrong in (y.T.contiguous().T, y.bfloat16()):
        with pytest.raises(TypeError, match="outputs must be"):
            layer.ops.add_lora(wrong, x, layer.shelves, LoraBatch(SLOTS, 4))
