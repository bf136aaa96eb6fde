"""Latent attention, whose values are the last elements of the keys: against dense attention in float64, in every form."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.kernels.head_linear import reference as heads_reference
from penstock.kernels.paged_attention import latent_triton
from penstock.kernels.paged_attention.batch import PagedBatch
from penstock.kernels.paged_attention.device_batch import DeviceBatch
from penstock.kernels.paged_attention.device_reference import paged_attention_device
from penstock.kernels.paged_attention.latent_launch import LatentLaunch, latent_launch, sized_latent_workspace
from penstock.kernels.paged_attention.launch import AttentionWorkspace, invariant_launches
from penstock.kernels.paged_attention.triton import paged_attention
from penstock.kernels.prepare_kv.reference import PAD_SLOT_ID, Rotary, prepare_kv
from penstock.kernels.prepare_kv.triton import prepare_kv as prepare_kv_triton

SHAPES = st.sampled_from([(1, 8, 16), (4, 8, 24), (16, 64, 512), (3, 6, 34)])
"""Heads, rotated elements, elements of a latent."""
REQUESTS = st.lists(st.tuples(st.integers(0, 150), st.sampled_from([1, 1, 2, 5, 40])), min_size=1, max_size=4)


class Case:
    """Requests with random queries and keys in random blocks of a cache that is NaN elsewhere."""

    def __init__(self, shape, lengths, seed, block_size=16) -> None:
        self.heads, rotated, self.rank = shape
        self.lengths, self.size, self.block_size = lengths, rotated + self.rank, block_size
        self.rng = np.random.default_rng(seed)
        self.keys = [self._random(a + b, self.size) for a, b in lengths]
        self.queries = [self._random(new, self.heads, self.size) for _, new in lengths]
        self.scale = self.size**-0.5

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal(shape, np.float32))

    def build(self, chosen: list[int], skip: int = 0):
        """Queries of the chosen requests, but for those that came earlier; the cache; starts, lengths and block table."""
        parts = [self.queries[i][min(skip, self.lengths[i][1] - 1) :] for i in chosen]
        lens = [sum(self.lengths[i]) for i in chosen]
        blocks = [-(-length // self.block_size) for length in lens]
        # A layer's strided view of pages that hold two.
        pages = torch.full((sum(blocks) + 2, 2, 1, 1, self.block_size, self.size), float("nan"))
        cache, free = pages[:, 1], list(self.rng.permutation(np.arange(1, sum(blocks) + 2)))
        table = np.zeros((len(chosen), max(blocks)), np.int32)
        for row, i in enumerate(chosen):
            for block in range(blocks[row]):
                where = table[row, block] = free.pop()
                part = self.keys[i][block * self.block_size : (block + 1) * self.block_size]
                cache[int(where), 0, 0, : len(part)] = part
        starts = np.concatenate(([0], np.cumsum([len(part) for part in parts]))).astype(np.int32)
        return torch.cat(parts), cache, starts, np.array(lens, np.int32), table

    def run(self, ops, chosen: list[int], skip: int = 0) -> list[torch.Tensor]:
        q, cache, starts, lens, table = self.build(chosen, skip)
        batch = PagedBatch(self.block_size, starts, lens, table)
        out = ops.paged_attention(q, cache, batch, self.scale, value_size=self.rank)
        return list(out.split(np.diff(starts).tolist()))

    def dense(self, i: int) -> torch.Tensor:
        computed, new = self.lengths[i]
        keys = self.keys[i].double()
        scores = torch.einsum("qhd,kd->hqk", self.queries[i].double(), keys) * self.scale
        later = torch.arange(computed + new) > torch.arange(computed, computed + new)[:, None]
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return torch.einsum("hqk,kd->qhd", weights, keys[:, -self.rank :])


cases = st.builds(Case, SHAPES, REQUESTS, st.integers(0, 2**32), st.sampled_from([8, 16, 48]))


@pytest.mark.req("ATT-21")
@settings(max_examples=25)
@given(cases)
def test_equals_dense_attention(ops_in, case):
    for i, out in enumerate(case.run(ops_in(torch.float32), list(range(len(case.lengths))))):
        torch.testing.assert_close(out.double(), case.dense(i), rtol=1e-4, atol=1e-5)


@settings(max_examples=25)
@given(cases, st.integers(0, 3), st.integers(0, 40))
def test_bits_depend_on_the_request_alone(ops_in, case, which, skip):
    """In a crowd, alone, and with a part of the queries in an earlier batch."""
    which, ops = which % len(case.lengths), ops_in(torch.float32)
    # torch's own products of other sizes take another path for a single item.
    assume(ops.form != "reference" or case.rank % 8 == 0)
    order = case.rng.permutation(len(case.lengths)).tolist()
    crowd = case.run(ops, order)[order.index(which)]
    (alone,) = case.run(ops, [which])
    (later,) = case.run(ops, [which], skip)
    assert torch.equal(crowd, alone) and torch.equal(alone[-len(later) :], later)


def on_device(case: Case, device: str, form) -> torch.Tensor:
    """All requests, and behind them one of padding with two tokens more."""
    q, cache, starts, lens, table = case.build(list(range(len(case.lengths))))
    q = torch.cat([q, torch.full((3, *q.shape[1:]), float("nan"))])
    batch = DeviceBatch.from_host(
        np.append(starts, starts[-1] + 1),
        np.append(lens, 0).astype(np.int32),
        table,
        case.block_size,
        rows=np.append(np.arange(len(lens)), 0).astype(np.int32),
        num_tokens=len(q),
        device=device,
    )
    pages = cache.to(device)
    return form(q.to(device), pages, batch, case.scale, value_size=case.rank).cpu()


@pytest.mark.parametrize("shape", [(1, 8, 16), (20, 8, 24), (16, 64, 512)])
def test_device_forms_equal_dense_attention(triton_device, shape):
    case = Case(shape, [(70, 1), (0, 9), (33, 2)], 1)
    expected = torch.cat([*(case.dense(i) for i in range(3)), torch.zeros(3, case.heads, case.rank, dtype=torch.float64)])
    for form in (paged_attention_device, paged_attention):
        torch.testing.assert_close(on_device(case, triton_device, form).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 2, 5, 16])
@pytest.mark.parametrize(("shape", "block_h"), [((20, 8, 24), 16), ((80, 8, 24), 64), ((1, 6, 34), 16)])
def test_split_keys_of_few_and_many_heads_equal_dense_attention(triton_device, monkeypatch, shape, block_h, splits):
    """Requests with fewer tiles than splits, with as many, and with more; the last tile of heads is not full."""
    monkeypatch.setattr(latent_triton, "latent_launch", lambda *_: LatentLaunch(block_h, splits, least_tiles=1))
    case = Case(shape, [(70, 1), (0, 3), (259, 2)], 1)
    expected = torch.cat([*(case.dense(i) for i in range(3)), torch.zeros(3, case.heads, case.rank, dtype=torch.float64)])
    workspaces, of = [], latent_triton.latent_workspace

    def filled(*arguments) -> AttentionWorkspace:
        workspaces.append(of(*arguments))
        for part in (workspaces[-1].values, workspaces[-1].lse):
            part.fill_(float("nan"))  # what no split has left enters nothing
        return workspaces[-1]

    monkeypatch.setattr(latent_triton, "latent_workspace", filled)
    found = on_device(case, triton_device, paged_attention)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    [used] = workspaces
    assert not used.arrived.any(), "the next launch counts from nothing"
    left = int((~used.lse.isnan()).sum())
    # Of a token whose keys fill one split nothing is left: it is written at once.
    tiles = [-(-position // 32) for position in (71, 1, 2, 3, 260, 261)]
    shares = [-(-number // splits) for number in tiles]
    counts = [-(-number // share) for number, share in zip(tiles, shares, strict=True)]
    assert left == case.heads * sum(count for count in counts if count > 1)


def test_what_is_split_does_not_depend_on_the_requests_beside_it(triton_device, monkeypatch):
    monkeypatch.setattr(latent_triton, "latent_launch", lambda *_: LatentLaunch(16, 4, least_tiles=1))
    case = Case((4, 8, 24), [(70, 1), (40, 3), (259, 1)], 1)
    crowd = on_device(case, triton_device, paged_attention)
    case.lengths, case.keys, case.queries = case.lengths[2:], case.keys[2:], case.queries[2:]
    assert torch.equal(on_device(case, triton_device, paged_attention)[0], crowd[4])


def launches(heads: int, tokens: list[int], itemsize: int = 2, max_keys: int = 131_072) -> list[tuple[int, int]]:
    """Heads a program, and splits."""
    found = [latent_launch(heads, number, itemsize, max_keys, False) for number in tokens]
    return [(it.block_h, it.splits) for it in found]


def test_a_program_takes_many_heads_where_enough_programs_are_left():
    assert [heads for heads, _ in launches(128, [1, 63, 64, 4096])] == [16, 16, 64, 64]
    assert launches(16, [4096]) == [(16, 1)], "of a rank of eight"
    assert launches(128, [4096], itemsize=1) == [(16, 1)], "widened numbers leave no registers"


def test_keys_are_split_where_tokens_leave_the_device_idle():
    """One token with 128 heads was 8 programs, with the 16 of a rank one."""
    assert launches(128, [1, 2, 8, 32, 64, 128, 129]) == [(16, 32), (16, 16), (16, 4), (16, 1), (64, 2), (64, 1), (64, 1)]
    assert launches(16, [1, 8, 64, 256, 257]) == [(16, 32), (16, 32), (16, 4), (16, 1), (16, 1)]
    assert launches(128, [1], max_keys=1024) == [(16, 4)], "a split has eight tiles of keys at least"
    assert latent_launch(128, 1, 2, 131_072, True) == LatentLaunch(16, 1) == latent_launch(128, 4096, 2, 131_072, True)


@given(st.integers(1, 200), st.integers(1, 600), st.sampled_from([1, 2, 4]), st.integers(1, 200_000), st.booleans())
def test_a_workspace_of_all_steps_has_room_for_each(heads, most, itemsize, max_keys, invariant):
    room = sized_latent_workspace(heads, 8, itemsize, most, max_keys, invariant, "meta")
    for tokens in range(1, most + 1):
        launch = latent_launch(heads, tokens, itemsize, max_keys, invariant)
        assert launch.parts(tokens) * heads <= len(room.lse) == len(room.values)
        assert launch.counters(heads, tokens) <= len(room.arrived)


def test_a_workspace_that_is_too_small_is_refused():
    empty, few = torch.empty(0), torch.zeros(0, dtype=torch.int32)
    batch = DeviceBatch.from_host(np.array([0, 1], np.int32), np.array([9], np.int32), np.zeros((1, 64), np.int32), 16)
    q, cache = torch.zeros(1, 4, 32), torch.zeros(1, 1, 1, 16, 32)
    with pytest.raises(ValueError, match="too small for 1 tokens"):
        paged_attention(q, cache, batch, 1.0, value_size=24, workspace=AttentionWorkspace(empty, empty, few))


def test_batch_invariant_launches_split_no_latent(monkeypatch):
    asked, of = [], latent_triton.latent_launch
    monkeypatch.setattr(latent_triton, "latent_launch", lambda *given: asked.append(given[-1]) or of(*given))
    monkeypatch.setattr(latent_triton, "_latent_attention_kernel", {(1, 1, 1): lambda *_, **__: None})
    batch = DeviceBatch.from_host(np.array([0, 1], np.int32), np.array([9], np.int32), np.zeros((1, 64), np.int32), 16)
    q, cache = torch.zeros(1, 4, 32), torch.zeros(1, 1, 1, 16, 32)
    paged_attention(q, cache, batch, 1.0, value_size=24, table=invariant_launches)
    assert asked == [True]


@pytest.mark.parametrize("form", ["cpu", "triton"])
def test_a_latent_is_written_once_and_nothing_else_is(ops_in, triton_device, form):
    write = ops_in(torch.float32).prepare_kv if form == "cpu" else prepare_kv_triton
    device = "cpu" if form == "cpu" else triton_device
    heads, rotated, rank = 3, 8, 20
    q, key = torch.randn(4, heads, rotated + rank), torch.randn(4, 1, rotated + rank)
    angles = torch.randn(4, rotated // 2)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    slots = torch.tensor([17, 3, 40, 16])
    if form == "triton":
        slots[1] = PAD_SLOT_ID
    caches = [torch.full((3, 1, 1, 16, rotated + rank), 7.0) for _ in range(2)]
    expected = prepare_kv(q, key, None, caches[0], slots, Rotary(*table.chunk(2, -1)), None)
    caches[0][0, 0, 0, 0] = 7.0  # where the reference puts what has no slot
    ours = caches[1].to(device)
    rotary = Rotary(*table.to(device).chunk(2, -1))
    out = write(q.to(device), key.to(device), None, ours, slots.to(device), rotary, None)
    torch.testing.assert_close(out.cpu(), expected)
    torch.testing.assert_close(ours.cpu(), caches[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_head_has_a_weight_of_its_own(ops_in, dtype):
    ops, weight = ops_in(dtype), torch.randn(4, 19, 37).to(dtype)
    x = torch.randn(9, 4, 60).to(dtype)[..., 3:40]  # a part of each head
    out = ops.head_linear(x, ops.pack_heads(weight))
    tolerance = 1e-5 if dtype is torch.float32 else 2**-6
    expected = torch.einsum("nhi,hoi->nho", x.double(), weight.double())
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=10 * tolerance)
    assert out.dtype is dtype and out.is_contiguous()
    assert ops.head_linear(x[:0], ops.pack_heads(weight)).shape == (0, 4, 19)


def test_a_rows_bits_are_the_same_among_any_others(native):
    ops, x = native(torch.bfloat16), torch.randn(30, 3, 50).bfloat16()
    weight = ops.pack_heads(torch.randn(3, 21, 50).bfloat16())
    whole = ops.head_linear(x, weight)
    for first, count in ((0, 1), (3, 2), (7, 20)):
        assert torch.equal(ops.head_linear(x[first : first + count], weight), whole[first : first + count])
    plain = heads_reference.pack_heads(torch.randn(3, 21, 50))
    with pytest.raises(TypeError, match=r"for torch\.bfloat16, not torch\.bfloat16 and torch\.float32"):
        ops.head_linear(x, plain)
