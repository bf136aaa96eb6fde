"""A KV cache of eight bits on a GPU: what the kernels write is a CPU's, byte by byte, and what they read is attended in float64.

Interpreted here, compiled on a GPU.
"""

import pytest
import torch
from device_cases import DeviceCase
from test_latent_attention_op import Case as LatentCase
from test_latent_attention_op import on_device
from test_triton_attention import DECODE, DRAFTS, FIXED, MIXED, check, small

from penstock.kernels.paged_attention.device_reference import paged_attention_device
from penstock.kernels.paged_attention.launch import fast_launches
from penstock.kernels.paged_attention.triton import paged_attention
from penstock.kernels.prepare_kv import reference
from penstock.kernels.prepare_kv.cache_rows import FLOATS_OF_EIGHT_BITS, SCALED, from_rows, row_size, to_rows
from penstock.kernels.prepare_kv.reference import PAD_SLOT_ID, QKNorm, Rotary
from penstock.kernels.prepare_kv.triton import prepare_kv

KEPT = (*FLOATS_OF_EIGHT_BITS, SCALED)
UNTOUCHED = 77
HEAD, HEADS, BLOCK = 40, 3, 8
"""No power of two."""


def written(device: str, form, x: torch.Tensor, kept: torch.dtype, angles: torch.Tensor, scales=None, norm=None, values=True):
    """Every byte of a cache with [n, HEADS, HEAD] keys, and as many values of the opposite sign, in the slots from BLOCK on."""
    slots = torch.arange(len(x)) + BLOCK
    slots[2] = PAD_SLOT_ID
    shape = (-(-len(x) // BLOCK) + 2, 2, 1 + values, HEADS, BLOCK, row_size(HEAD, kept))
    pages = torch.full(shape, UNTOUCHED, dtype=torch.int8)
    there = pages.to(device)
    rotary = Rotary(angles.cos().to(device), angles.sin().to(device))
    given = x.to(device)
    scales, norm = None if scales is None else scales.to(device), norm and QKNorm(*(w.to(device) for w in norm[:2]), 1e-6)
    form(given, given, -given if values else None, there.view(kept)[:, 1], slots.to(device), rotary, norm, scales)
    there = there.cpu()
    there[0] = UNTOUCHED  # where the reference puts what has no slot
    return there


def numbers(kept: torch.dtype) -> torch.Tensor:
    """Of a format: all of them, the middles between two, what is a little off, far beyond or not finite. Of whole numbers: rows
    of all magnitudes, one of zeros, one of ties."""
    if kept is SCALED:
        rows = torch.randn(11, HEADS, HEAD) * 10 ** torch.linspace(-38, 30, 11 * HEADS).view(11, HEADS, 1)
        rows[3, 0], rows[4, 1] = 0.0, torch.arange(HEAD) / 2
        rows[4, 1, -1], rows[5, 0, -1], rows[6, 1, 3] = 127.0, float("nan"), -float("inf")
        return rows
    most = torch.finfo(kept).max
    codes = torch.arange(256, dtype=torch.uint8).view(kept).float()
    codes = codes[codes.isfinite()].sort().values.unique()
    middles = (codes[1:] + codes[:-1]) / 2
    beyond = torch.tensor([1e9, -1e9, most * 1.002, -most * 1.2, float("inf"), -float("inf"), 1e-9, -1e-30, 0.0, float("nan")])
    found = torch.cat((codes, middles, middles * 1.01, middles * 0.99, beyond))
    return torch.cat((found, torch.randn(-len(found) % (HEADS * HEAD)))).view(-1, HEADS, HEAD)


def same_bytes(found: torch.Tensor, expected: torch.Tensor, kept: torch.dtype) -> bool:
    """But for which NaN one is, and what a row holds whose scale is none."""
    if kept is not SCALED:
        found, expected = (x.view(kept).float().nan_to_num(777.0, posinf=888.0) for x in (found, expected))
        return torch.equal(found, expected)
    broken = expected[..., HEAD:].contiguous().view(torch.float32).isnan()
    found, expected = (x.masked_fill(broken, 0) for x in (found, expected))
    return torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # an interpreter's, of infinities
@pytest.mark.req("Q-06", "Q-17")
@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_each_number_becomes_the_byte_that_it_is_on_a_cpu(triton_device, kept, divided):
    torch.manual_seed(0)
    x, turned = numbers(kept), 24 if divided else HEAD
    scales = torch.tensor([[0.3, 7.0, 1.0], [40.0, 1.0, 0.9]]) if divided and kept is not SCALED else None
    angles = torch.zeros(len(x), turned // 2)  # no rotation, so that nothing else is rounded
    found, expected = (written(triton_device, form, x, kept, angles, scales) for form in (prepare_kv, reference.prepare_kv))
    assert same_bytes(found, expected, kept)
    assert (found[:, 0] == UNTOUCHED).all() and (found[1:, 1].view(torch.uint8) != UNTOUCHED).any()
    if kept is SCALED:
        broken = found[1:, 1, :, :, :, HEAD:].contiguous().view(torch.float32).isnan()
        assert broken.sum() == 2 * 2, "rows that are not finite stay so"


@pytest.mark.parametrize(("kept", "values"), [(torch.float8_e4m3fn, True), (SCALED, True), (SCALED, False)], ids=str)
def test_keys_are_normalised_and_rotated_before_they_are_rounded(triton_device, kept, values):
    """To a step of the format at most, of an element or a row; without values as well, as latents are."""
    torch.manual_seed(1)
    x, angles = torch.randn(9, HEADS, HEAD), torch.randn(9, HEAD // 4)
    norm = (torch.randn(HEAD), torch.randn(HEAD))
    scales = None if kept is SCALED else torch.tensor([[0.01, 0.02, 0.1], [0.03, 0.02, 0.1]])
    arguments = x, kept, angles, scales, norm, values
    found, expected = (written(triton_device, form, *arguments) for form in (prepare_kv, reference.prepare_kv))
    found, expected = (from_rows(part[1:, 1].view(kept), HEAD).float() for part in (found, expected))
    step = expected.abs() / 8 if kept is not SCALED else expected.abs().amax(-1, keepdim=True) / 120
    apart = (found - expected).abs()
    assert (apart <= step).all() and ((apart > 1e-5 * expected.abs()).float().mean() < 0.01)


def shape(group: int, kv_heads: int, head_size: int, lengths: list[tuple[int, int]], **options) -> dict:
    return {"group": group, "kv_heads": kv_heads, "head_size": head_size, "lengths": lengths, **options}


CASES = {
    "decodes": (shape(4, 2, 16, DECODE, pad_tokens=2, block_size=8), small(1)),
    "splits and sinks": (shape(2, 2, 24, DECODE, sinks=True), small(4)),
    "drafts in a window": (shape(4, 1, 16, DRAFTS, window=9, softcap=2.0), small(2)),
    "prompts in a window": (shape(2, 1, 16, [(20, 7), (33, 1), (0, 40)], block_size=8, window=11), small(1)),
    "split prompts": (shape(16, 1, 16, [(60, 5), (9, 1)]), small(2)),
    "fixed splits": (shape(4, 1, 16, MIXED, pad_tokens=3), FIXED),
}


@pytest.mark.req("Q-18", "ATT-24")
@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_attention_reads_the_numbers_that_were_kept(triton_device, name, kept):
    """Beside pages that are NaN, in blocks and outside of windows."""
    options, table = CASES[name]
    check(DeviceCase(**options, kept=kept), triton_device, table)


@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_torch_on_a_device_reads_them_too(kept):
    case = DeviceCase(2, 2, 24, MIXED, window=11, sinks=True, pad_tokens=2, dtype=torch.float64, kept=kept)
    q, cache, batch = case.build()
    out = paged_attention_device(q, cache, batch, case.scale, 0.0, case.sink, scales=case.scales)
    torch.testing.assert_close(out, case.dense(), rtol=1e-9, atol=1e-9)


class EightBitLatents(LatentCase):
    """Latents that a cache keeps in eight bits; `keys` are those that it holds."""

    def __init__(self, kept: torch.dtype) -> None:
        super().__init__((3, 8, 24), [(40, 1), (0, 5)], 1)
        self.kept = kept
        self.scales = None if kept is SCALED else torch.tensor([[0.3], [99.0]])
        divisor = 1.0 if self.scales is None else self.scales[0, 0]
        self.rows = [to_rows(key * 2.0 ** (torch.arange(len(key)) % 5)[:, None] / divisor, kept) for key in self.keys]
        self.keys = [from_rows(rows, self.size).float() * divisor for rows in self.rows]

    def build(self, chosen, skip=0):
        q, cache, starts, lens, table = super().build(chosen, skip)
        pages = torch.full((*cache.shape[:4], row_size(self.size, self.kept)), -1, dtype=torch.int8)
        for row, i in enumerate(chosen):
            for at, rows in enumerate(self.rows[i].view(torch.int8)):
                pages[int(table[row, at // self.block_size]), 0, 0, at % self.block_size] = rows
        return q, pages.view(self.kept), starts, lens, table


@pytest.mark.req("Q-22")
@pytest.mark.parametrize("kept", KEPT, ids=str)
def test_latents_are_scaled_as_keys_and_as_values(triton_device, kept):
    case = EightBitLatents(kept)
    expected = torch.cat([*(case.dense(i) for i in range(2)), torch.zeros(3, case.heads, case.rank, dtype=torch.float64)])
    scales = None if case.scales is None else case.scales.to(triton_device)
    for form in (paged_attention_device, paged_attention):
        found = on_device(case, triton_device, lambda *args, form=form, **options: form(*args, **options, scales=scales))
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kept", KEPT, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_real_sizes_are_read_in_every_dtype(dtype, kept):
    for window, sinks in ((None, False), (300, True)):
        lengths = [(0, 7), (4000, 1), (0, 700), (100, 130), (0, 0)]
        check(DeviceCase(4, 2, 128, lengths, 16, window, 0.0, sinks, pad_tokens=9, dtype=dtype, kept=kept), "cuda", fast_launches)
