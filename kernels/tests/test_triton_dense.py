"""The small Triton kernels against their references in float64: interpreted here, compiled on a GPU."""

from functools import partial

import pytest
import torch

from penstock.kernels.embedding.triton import embedding
from penstock.kernels.gated_mul import reference as gated_mul
from penstock.kernels.gated_mul.triton import clamped_swiglu, gelu_tanh_mul, silu_mul
from penstock.kernels.ops import ops_for, triton_ops
from penstock.kernels.prepare_kv import reference as kv_reference
from penstock.kernels.prepare_kv.reference import PAD_SLOT_ID, QKNorm, Rotary
from penstock.kernels.prepare_kv.triton import prepare_kv

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
UNTOUCHED = 7.0


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [6, 128, 1100])
def test_embedding_gathers_rows_and_gives_zeros_for_ids_outside(triton_device, dtype, size):
    table = torch.randn(9, size).to(dtype)
    ids = torch.tensor([3, 0, 8, 3, -1, 9], dtype=torch.int32)
    out = embedding(table.to(triton_device), ids.to(triton_device)).cpu()
    assert torch.equal(out[:4], table[[3, 0, 8, 3]]) and not out[4:].any()
    assert embedding(table.to(triton_device), ids[:0].to(triton_device)).shape == (0, size)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # an interpreter's: a GPU has infinities without one
@pytest.mark.req("PERF-09")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 16), (3, 74), (2, 1100), (0, 8)])
def test_gated_products_equal_their_reference(triton_device, shape, dtype):
    rows, size = shape
    x = torch.cat((torch.randn(rows, 2 * size) * 10, torch.full((1, 2 * size), -1e4), torch.zeros(1, 2 * size))).to(dtype)
    clamp = {"slope": 1.7, "limit": 2.5}
    for ours, reference in (
        (silu_mul, gated_mul.silu_mul),
        (gelu_tanh_mul, gated_mul.gelu_tanh_mul),
        (partial(clamped_swiglu, **clamp), partial(gated_mul.clamped_swiglu, **clamp)),
    ):
        out = ours(x.to(triton_device)).cpu()
        torch.testing.assert_close(out.double(), reference(x.double()).double(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert silu_mul(x[:0].to(triton_device)).shape == (0, size)


def fused_qkv(tokens: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: str):
    """Queries, keys and values as the fused projection leaves them: slices of its rows."""
    sizes = [heads * size, kv_heads * size, kv_heads * size]
    parts = torch.randn(tokens, sum(sizes)).to(dtype).to(device).split(sizes, dim=-1)
    return [part.unflatten(1, (-1, size)) for part in parts]


def check_prepare_kv(device, dtype, heads, kv_heads, size, rotated, block_size, slots, normalised):
    tokens, blocks = len(slots), max(slots) // block_size + 2
    q, k, v = fused_qkv(tokens, heads, kv_heads, size, dtype, device)
    # A page holds this layer's block and another's, so that blocks lie apart.
    pages = torch.full((blocks, 2, 2 * kv_heads * block_size * size), UNTOUCHED, dtype=dtype, device=device)
    cache = pages[:, 1].view(blocks, 2, kv_heads, block_size, size)
    angles = torch.randn(tokens, rotated // 2)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    rotary = Rotary(*table.to(device).chunk(2, -1))
    qk_norm = QKNorm(torch.randn(size), torch.randn(size), 1e-6) if normalised else None
    there = None if qk_norm is None else QKNorm(qk_norm.q_weight.to(device), qk_norm.k_weight.to(device), qk_norm.eps)
    mapping = torch.tensor(slots, dtype=torch.int32)
    out = prepare_kv(q, k, v, cache, mapping.to(device), rotary, there)

    q, k, v = (x.cpu().double() for x in (q, k, v))
    expected = torch.full(cache.shape, UNTOUCHED, dtype=torch.float64)
    if qk_norm is not None:
        q, k = (norm64(x, weight) for x, weight in ((q, qk_norm.q_weight), (k, qk_norm.k_weight)))
    q, k = rope64(q, angles), rope64(k, angles)
    for token, slot in enumerate(slots):
        if slot != PAD_SLOT_ID:
            expected[slot // block_size, 0, :, slot % block_size] = k[token]
            expected[slot // block_size, 1, :, slot % block_size] = v[token]
    tolerance = 3 * TOLERANCE[dtype]
    torch.testing.assert_close(out.cpu().double(), q, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(cache.cpu().double(), expected, atol=tolerance, rtol=tolerance)
    untouched = expected == UNTOUCHED
    assert bool((cache.cpu().double()[untouched] == UNTOUCHED).all()) and bool((pages[:, 0] == UNTOUCHED).all())


def norm64(x, weight):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight.double()


def rope64(x, angles):
    half = angles.shape[1]
    cos, sin = (table[:, None].double() for table in (angles.cos(), angles.sin()))
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


@pytest.mark.req("PERF-09", "CG-07")
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rotated"),
    [(4, 2, 64, 64), (7, 1, 80, 80), (2, 2, 96, 72), (3, 3, 16, 8), (1, 1, 256, 256), (20, 4, 128, 128)],
)
def test_prepare_kv_writes_the_tokens_slots_and_no_other(triton_device, heads, kv_heads, size, rotated, normalised):
    slots = [4 * 2 + 1, PAD_SLOT_ID, 0, 4 * 3 + 3]
    check_prepare_kv(triton_device, torch.float32, heads, kv_heads, size, rotated, 4, slots, normalised)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_prepare_kv_in_half_precision(triton_device, dtype):
    check_prepare_kv(triton_device, dtype, 4, 2, 64, 64, 16, [PAD_SLOT_ID, 17], True)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(32, 8, 128), (16, 8, 128), (8, 4, 256), (28, 4, 80)])
def test_prepare_kv_of_a_real_step(triton_device, heads, kv_heads, size):
    slots = torch.randperm(700 * 16)[:600].tolist()
    slots[::7] = [PAD_SLOT_ID] * len(slots[::7])
    for normalised in (False, True):
        check_prepare_kv(triton_device, torch.bfloat16, heads, kv_heads, size, size, 16, slots, normalised)


def test_prepare_kv_without_tokens(triton_device):
    check_prepare_kv(triton_device, torch.float32, 2, 1, 16, 16, 4, [PAD_SLOT_ID], False)
    q, k, v = fused_qkv(0, 2, 1, 16, torch.float32, triton_device)
    cache, angles = torch.zeros(1, 2, 1, 4, 16, device=triton_device), torch.zeros(0, 8, device=triton_device)
    slots = torch.zeros(0, dtype=torch.int32, device=triton_device)
    assert prepare_kv(q, k, v, cache, slots, Rotary(angles, angles), None).shape == (0, 2, 16)


@pytest.mark.req("CG-07", "ATT-26")
def test_the_reference_writes_padding_to_the_null_block_alone():
    q, k, v = fused_qkv(3, 2, 1, 8, torch.float32, "cpu")
    cache, angles = torch.full((3, 2, 1, 4, 8), UNTOUCHED), torch.randn(3, 4)
    slots = torch.tensor([PAD_SLOT_ID, 4 * 2 + 3, PAD_SLOT_ID], dtype=torch.int32)
    kv_reference.prepare_kv(q, k, v, cache, slots, Rotary(angles.cos(), angles.sin()), None)
    written = (cache != UNTOUCHED).any(dim=(1, 2, 4)).nonzero().tolist()
    assert written == [[0, 0], [2, 3]]
    assert torch.equal(cache[2, 1, 0, 3], v[1, 0])


def test_forms_are_refused_by_name(monkeypatch):
    with pytest.raises(ValueError, match=r"no Triton kernels for torch.float64 \(supported: torch.float32, torch.float16"):
        triton_ops(torch.float64)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="'cuda:1': torch sees no CUDA device"):
        ops_for("cuda:1", torch.float16)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="the package triton is not installed"):
        triton_ops(torch.float16)
