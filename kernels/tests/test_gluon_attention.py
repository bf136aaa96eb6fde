"""The Gluon kernel of long prompts: its own source on a stand-in of Hopper's asynchronous operations, against dense attention."""

import inspect
import textwrap
from dataclasses import replace
from types import FunctionType, SimpleNamespace

import pytest
import torch
from device_cases import DeviceCase
from gluon_stand_in import Hazard, Machine, bound, pointer
from triton._C.libtriton import gluon_ir, ir
from triton.experimental.gluon import language as gl

from penstock.kernels.paged_attention import gluon, tiles
from penstock.kernels.paged_attention.launch import AttentionShape, gluon_launches
from penstock.kernels.paged_attention.triton import paged_attention

NAMES = ("_ask", "_produce", "_weigh", "_places", "_consume", "_gluon_attention_kernel")
BF16 = torch.bfloat16


def functions(old: str = "", new: str = "") -> dict[str, FunctionType]:
    """The kernel's functions, in which one place of the source reads otherwise."""
    text = "\n".join(textwrap.dedent(inspect.getsource(getattr(gluon, name).fn)) for name in NAMES)
    assert not old or text.count(old) == 1, f"{text.count(old)} places with {old!r}"
    lines = [line for line in text.replace(old, new).splitlines() if not line.startswith("@")]
    found: dict = {"gl": SimpleNamespace(constexpr=int)}
    exec(compile("\n".join(lines), "gluon.py", "exec"), found)
    of = {name: found[name] for name in NAMES}
    return {**of, "_request_of": tiles.request_of.fn}


def run(
    case: DeviceCase, old: str = "", new: str = "", *, seed: int = 0, eager: bool = False, stages: int = 2
) -> tuple[torch.Tensor, int]:
    """The result, [n, heads, d]: NaN of requests with as many queries as the number beside it, which are another launch's."""
    q, cache, batch = case.build()
    shape = AttentionShape(case.group * case.kv_heads, case.kv_heads, case.head_size, 2)
    keys = batch.block_table.shape[1] * batch.block_size
    launch = gluon_launches(shape, batch.num_requests, 1 << 20, keys, batch.num_tokens)[-1]
    assert launch.gluon
    out = torch.full(q.shape, float("nan"), dtype=BF16)
    blocks, source = launch.blocks(batch.num_requests, batch.num_tokens), functions(old, new)
    kv = SimpleNamespace(tensor=cache, layout=None, block_shape=[1, 1, 1, batch.block_size, gluon.WIDTH])
    tensors = [pointer(it) for it in (batch.rows, batch.query_start_loc, batch.seq_lens, batch.block_table)]
    for block in range(blocks):
        for kv_head in range(case.kv_heads):
            machine = Machine((block, kv_head), (blocks, case.kv_heads), seed, eager)
            kernel = bound(source, {}, machine)["_gluon_attention_kernel"]
            kernel(
                pointer(out), pointer(q), kv, *tensors, batch.num_requests, len(cache), case.scale * 1.4426950408889634,
                q.stride(0), q.stride(1), batch.block_table.stride(0), shape.group, case.head_size, batch.block_size,
                launch.block_q, launch.tile, stages, launch.skip, gluon.WIDTH, (0, 0),
            )  # fmt: skip
    return out, launch.skip


def check(case: DeviceCase, *mutation: str, **how) -> None:
    found, skip = run(case, *mutation, **how)
    sizes = [len(it) for it in case.queries]
    for ours, dense in zip(
        found.split([*sizes, case.pad_tokens])[:-1], case.dense().split([*sizes, case.pad_tokens])[:-1], strict=True
    ):
        if len(ours) > skip:
            torch.testing.assert_close(ours.double(), dense, rtol=3e-2, atol=3e-2)
        else:
            assert ours.isnan().all(), "another launch's"


RAGGED = [(20, 7), (300, 40), (0, 0), (0, 150), (33, 1), (129, 33)]
"""A chunk behind a prefix on no edge, a padding request, a prompt, a decode, and a chunk one beyond a tile."""
SCHEDULES = [{"seed": seed, "eager": eager} for seed in range(3) for eager in (False, True)]


@pytest.mark.parametrize("how", SCHEDULES, ids=str)
def test_ragged_prompts_equal_dense_attention_in_any_order_of_events(how):
    check(DeviceCase(4, 1, 64, RAGGED, block_size=16, pad_tokens=3, dtype=BF16), **how)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize(("group", "kv_heads", "head_size"), [(1, 2, 128), (7, 1, 64), (8, 1, 128)])
def test_each_geometry_equals_dense_attention(group, kv_heads, head_size, block_size):
    lengths = [(block_size * 3, block_size), (500, 41)]
    check(DeviceCase(group, kv_heads, head_size, lengths, block_size=block_size, dtype=BF16))


@pytest.mark.parametrize("stages", [1, 3, 4])
def test_rings_of_other_sizes_go_round(stages):
    check(DeviceCase(2, 1, 64, [(900, 100)], block_size=64, dtype=BF16), stages=stages)


MUTATIONS = {
    "keys are not waited for": ("mbarrier.wait(key_ready.index(slot), (tile // STAGES) & 1)", "pass"),
    "values are not waited for": ("mbarrier.wait(value_ready.index(before), ((tile - 1) // STAGES) & 1)", "pass"),
    "the last values are not waited for": ("mbarrier.wait(value_ready.index(end), ((tiles - 1) // STAGES) & 1)", "pass"),
    "a slot of keys is not waited for": ("mbarrier.wait(key_free.index(slot), before)", "pass"),
    "a slot of values is not waited for": ("mbarrier.wait(value_free.index(slot), before)", "pass"),
    "the writer's phase is the reader's": ("before = ((tile // STAGES) & 1) ^ 1", "before = (tile // STAGES) & 1"),
    "the reader's phase stays": ("key_ready.index(slot), (tile // STAGES) & 1)", "key_ready.index(slot), 0)"),
    "one warpgroup frees keys for both": ("init(key_free.index(slot), count=2)", "init(key_free.index(slot), count=1)"),
    "one warpgroup frees values for both": (
        "mbarrier.init(value_free.index(slot), count=2)", "mbarrier.init(value_free.index(slot), count=1)",
    ),
    "too few bytes are expected": ("BYTES: gl.constexpr = TILE * HEAD * 2", "BYTES: gl.constexpr = TILE * HEAD"),
    "keys are freed before they are multiplied": (
        "score = warpgroup_mma_wait(0, deps=[score])\n    mbarrier.arrive(key_free.index(0), count=1)",
        "mbarrier.arrive(key_free.index(0), count=1)\n    score = warpgroup_mma_wait(0, deps=[score])",
    ),
    "values are freed before they are multiplied": (
        "acc, weight = warpgroup_mma_wait(0, deps=[adding, weight])\n        mbarrier.arrive(value_free.index(before), count=1)",
        "mbarrier.arrive(value_free.index(before), count=1)\n        acc, weight = warpgroup_mma_wait(0, deps=[adding, weight])",
    ),
    "values are never freed": ("mbarrier.arrive(value_free.index(before), count=1)", "pass"),
    "scores are not waited for": ("score = warpgroup_mma_wait(1, deps=[begun])", "score = warpgroup_mma_wait(2, deps=[begun])"),
    "weights are not kept": (
        "acc, weight = warpgroup_mma_wait(0, deps=[adding, weight])\n        mbarrier",
        "acc = warpgroup_mma_wait(0, deps=[adding])\n        mbarrier",
    ),
    "queries are stored without a fence": ("(dims >= 0), 0.0))\n    fence_async_shared()", "(dims >= 0), 0.0))"),
    "the last page is not shifted": ("gl.where(first + page == last, -shift, 0)", "0"),
    "a page beyond the last is read": ("first + page <= last, no_block", "first + page <= last, 0"),
    "the diagonal is not masked": ("if tile >= full:", "if tile > full:"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_barrier_wait_and_mask_is_needed(name):
    """Of a kernel that lacks one, some schedule of events hangs, races, or gives another result."""
    case = [(900, 100), (5, 40)]
    with pytest.raises((Hazard, AssertionError, TypeError, AttributeError)) as told:
        for how in SCHEDULES:
            check(DeviceCase(1, 1, 64, case, block_size=64, dtype=BF16), *MUTATIONS[name], **how)
    assert "places with" not in str(told.value) and "stand-in itself" not in str(told.value)


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("page", [16, 32, 64, 128])
def test_pieces_side_by_side_are_the_matrix_that_is_multiplied(head_size, page):
    """By the compiler's own layouts: the bits of an element's place are those in its piece, then pages, then columns of 64."""
    context = ir.context()
    ir.load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)

    def bases(shape: list[int]) -> list[list[int]]:
        layout = gl.NVMMASharedLayout(128, 16, len(shape))
        return [basis[-2:] for basis in builder.to_linear_layout(layout._to_ir(builder), shape).offset_bases]

    pages = [[page << bit, 0] for bit in range((128 // page).bit_length() - 1)]
    columns = [[0, gluon.WIDTH]] * (head_size // 128)
    assert bases([128, head_size]) == bases([1, 1, 1, page, gluon.WIDTH]) + pages + columns


def test_layers_with_a_window_and_split_keys_are_tritons():
    shape = AttentionShape(4, 1, 64, 2)
    assert gluon_launches(shape, 1, 5000, 8192, 5000)[-1].gluon
    assert not gluon_launches(replace(shape, windowed=True), 1, 5000, 8192, 5000)[-1].gluon
    assert not gluon_launches(shape, 1, 100, 131_072, 100)[-1].gluon and not gluon_launches(shape, 4, 1, 8192, 4)[-1].gluon


def test_a_window_takes_the_triton_launches(triton_device):
    case = DeviceCase(4, 1, 64, [(20, 30)], window=21, dtype=BF16)
    q, cache, batch = case.build(triton_device)
    out = paged_attention(q, cache, batch, case.scale, table=gluon_launches)
    torch.testing.assert_close(out.cpu().double(), case.dense(), rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("head_size", [64, 128])
def test_real_prompts_equal_dense_attention(head_size, block_size):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Gluon's kernel is for Hopper")
    case = DeviceCase(4, 2, head_size, [(0, 2000), (100, 130), (1000, 1), (0, 0)], block_size, pad_tokens=9, dtype=BF16)
    q, cache, batch = case.build("cuda")
    # A table wide enough would split keys of so few tokens: its least is 16 tiles.
    out = paged_attention(q, cache, batch, case.scale, table=gluon_launches)
    torch.testing.assert_close(out.cpu().double(), case.dense(), rtol=3e-2, atol=3e-2)
