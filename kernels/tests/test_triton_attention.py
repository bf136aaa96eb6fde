"""Attention's Triton kernels against dense attention in float64, interpreted here and compiled on a GPU."""

import dataclasses

import numpy as np
import pytest
import torch
from device_cases import DeviceCase
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.paged_attention import triton as kernels
from penstock.kernels.paged_attention.device_batch import DeviceBatch
from penstock.kernels.paged_attention.launch import (
    MAX_SPLITS,
    AttentionShape,
    AttentionWorkspace,
    fast_launches,
    invariant_launches,
)
from penstock.kernels.paged_attention.triton import paged_attention

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def nan_workspace(shape: AttentionShape, launches, requests: int, tokens: int, device: str) -> AttentionWorkspace:
    """Full of NaN, so that nobody takes what nobody left there."""
    room = AttentionWorkspace.of(shape, launches, requests, tokens, device)
    room.values.fill_(float("nan"))
    room.lse.fill_(float("nan"))
    return room


def shape_of(case: DeviceCase) -> AttentionShape:
    return AttentionShape(case.group * case.kv_heads, case.kv_heads, case.head_size, case.dtype.itemsize)


def changed(table, changes):
    """A table whose launches are changed, to make lengths that an interpreter can do a test of tiles and splits."""
    return lambda *step: tuple(dataclasses.replace(launch, **changes(launch)) for launch in table(*step))


def run(case: DeviceCase, device: str, table=fast_launches) -> torch.Tensor:
    """The result, [n, heads, d]."""
    q, cache, batch = case.build(device)
    shape, max_keys = shape_of(case), batch.block_table.shape[1] * batch.block_size
    launches = table(shape, batch.num_requests, batch.max_query_len, max_keys, batch.num_tokens)
    sinks = None if case.sink is None else case.sink.to(device)
    room = nan_workspace(shape, launches, batch.num_requests, batch.num_tokens, device)
    scales = None if case.scales is None else case.scales.to(device)
    out = paged_attention(q, cache, batch, case.scale, case.softcap, sinks, table=table, workspace=room, scales=scales).cpu()
    assert not room.arrived.any(), "the next launch counts from nothing"
    return out


def small(splits: int, least: int = 1):
    """Tiles of 16 keys, in so many splits."""
    return changed(fast_launches, lambda launch: {"tile": 16, "splits": splits, "least_tiles": least})


def check(case: DeviceCase, device: str, table=fast_launches) -> None:
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(run(case, device, table).double(), case.dense(), rtol=tolerance, atol=tolerance)


DECODE = [(39, 1), (0, 1), (0, 0), (15, 1)]
DRAFTS = [(30, 3), (2, 2), (0, 1), (8, 4)]
MIXED = [(20, 7), (33, 1), (0, 30), (0, 0), (16, 16)]
"""A chunk, a decode, a prompt, a padding request, a chunk on the edges of blocks and tiles."""


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize(
    "case",
    [
        DeviceCase(4, 1, 64, DECODE, pad_tokens=3),
        DeviceCase(1, 2, 80, DECODE, block_size=8, sinks=True),
        DeviceCase(7, 1, 96, DECODE, block_size=32, softcap=0.7),
        DeviceCase(8, 1, 16, DECODE, window=20, sinks=True),
        DeviceCase(4, 1, 16, DRAFTS, window=9, block_size=24, pad_tokens=2),
        DeviceCase(4, 1, 16, DECODE, dtype=torch.bfloat16),
        DeviceCase(4, 1, 16, DECODE, dtype=torch.float16, sinks=True),
    ],
    ids=["padded", "sinks", "softcap", "window", "drafts", "bfloat16", "float16"],
)
def test_decoding_equals_dense_attention(triton_device, case, splits):
    check(case, triton_device, small(splits))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        DeviceCase(4, 1, 64, MIXED, pad_tokens=5),
        DeviceCase(7, 1, 16, MIXED, block_size=8, window=11, sinks=True),
        DeviceCase(1, 1, 128, [(3, 70)], softcap=20.0),
        DeviceCase(8, 1, 80, MIXED, block_size=32, window=33, softcap=2.0),
        DeviceCase(1, 1, 256, [(3, 66), (9, 1)]),
        DeviceCase(4, 1, 16, MIXED, dtype=torch.bfloat16),
        DeviceCase(4, 1, 16, MIXED, dtype=torch.float16, window=20),
    ],
    ids=["padded", "window", "softcap", "both", "head", "bfloat16", "float16"],
)
def test_mixed_batches_equal_dense_attention(triton_device, case):
    check(case, triton_device, small(2))


@pytest.mark.parametrize(
    "case",
    [
        DeviceCase(4, 1, 16, MIXED, pad_tokens=3, softcap=2.0),
        DeviceCase(7, 1, 16, DRAFTS, pad_tokens=3, window=11, sinks=True),
    ],
    ids=["mixed", "drafts"],
)
def test_invariant_launches_equal_dense_attention(triton_device, case):
    check(case, triton_device, FIXED)


@pytest.mark.slow
@settings(max_examples=30)
@given(
    case=st.builds(
        DeviceCase,
        group=st.sampled_from([1, 3, 8]),
        kv_heads=st.just(1),
        head_size=st.just(16),
        lengths=st.lists(
            st.tuples(st.integers(0, 60), st.sampled_from([1, 1, 2, 9, 40])) | st.just((0, 0)), min_size=1, max_size=3
        ),
        block_size=st.sampled_from([8, 16, 24]),
        window=st.none() | st.sampled_from([1, 16, 40]),
        sinks=st.booleans(),
        pad_tokens=st.sampled_from([0, 2]),
        seed=st.integers(0, 2**32),
    ),
    splits=st.sampled_from([1, 2, 3, 7]),
)
def test_any_split_of_any_batch_equals_dense_attention(triton_device, case, splits):
    """Also where there are more splits than tiles, so that most are empty."""
    check(case, triton_device, small(splits))


FIXED = changed(
    invariant_launches,
    lambda launch: {
        "block_m": 16,
        "block_q": launch.block_q * 16 // launch.block_m,
        "tile": 16,
        "splits": 4,
        "split_tokens": 32,
    },
)
"""Splits of 32 keys in tiles of 16 rows and 16 keys."""


@pytest.fixture
def exact_rows(monkeypatch):
    """Has the interpreter's products give a row the same bits wherever in a tile it is, as a GPU's do and BLAS does not."""
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: (a[:, :, None] * b[None]).sum(1, dtype=dtype))


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 21])
def test_invariant_launches_give_the_same_bits_in_any_company(triton_device, exact_rows, window):
    """Alone, in a crowd, and in two chunks."""
    case = DeviceCase(4, 1, 16, [(20, 7), (33, 1), (0, 20), (70, 5)], window=window)
    crowd = run(case, triton_device, FIXED).split([7, 1, 20, 5])
    for i, (computed, new) in enumerate(case.lengths):
        for skip in {0, new - 1}:
            part = DeviceCase(4, 1, 16, [(computed + skip, new - skip)], window=window)
            part.keys, part.values, part.queries = [case.keys[i]], [case.values[i]], [case.queries[i][skip:]]
            assert torch.equal(run(part, triton_device, FIXED), crowd[i][skip:])


def test_a_decoding_request_is_computed_alike_beside_a_prompt(triton_device, exact_rows):
    case = DeviceCase(4, 1, 16, [(50, 1), (30, 1)])
    mixed = DeviceCase(4, 1, 16, [(50, 1), (30, 1), (0, 40)])
    for name in ("keys", "values", "queries"):
        setattr(mixed, name, getattr(case, name) + getattr(mixed, name)[2:])
    assert torch.equal(run(mixed, triton_device, small(2))[:2], run(case, triton_device, small(2)))


def test_no_length_reaches_a_launch(monkeypatch):
    """Two steps of the same shape and other lengths: the same grids and numbers."""
    launches = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **options: launches.append(
                (grid, *(x for x in args if not isinstance(x, torch.Tensor)), sorted(options.items()))
            )

    monkeypatch.setattr(kernels, "_paged_attention_kernel", Recorder())

    def step(lengths: list[tuple[int, int]]) -> list:
        launches.clear()
        q, cache, batch = DeviceCase(4, 2, 16, lengths).build()
        table = torch.zeros(9, 64, dtype=torch.int32)
        batch = dataclasses.replace(batch, block_table=table, max_query_len=20)
        cache = torch.zeros(3, *cache.shape[1:])
        paged_attention(q, cache, batch, 1.0)
        return list(launches)

    first = step([(40, 1), (0, 20), (7, 2)])
    assert len(first) == 2  # short requests, long requests
    assert first == step([(900, 3), (16, 1), (2, 19)])


def test_a_workspace_that_is_too_small_is_refused():
    q, cache, batch = DeviceCase(4, 1, 16, DECODE).build()
    batch = dataclasses.replace(batch, block_table=torch.zeros(9, 64, dtype=torch.int32))
    with pytest.raises(ValueError, match="too small for 4 requests"):
        paged_attention(q, cache, batch, 1.0, workspace=AttentionWorkspace(torch.empty(1, 16), torch.empty(1), torch.zeros(1)))


@given(
    heads=st.sampled_from([(32, 8, 128, 2), (8, 1, 64, 2), (7, 1, 96, 4), (71, 1, 64, 2), (4, 4, 256, 2)]),
    max_requests=st.integers(1, 64),
    max_tokens=st.integers(64, 2048),
    max_keys=st.sampled_from([64, 4096, 131_072]),
    table=st.sampled_from([fast_launches, invariant_launches]),
    data=st.data(),
)
def test_a_workspace_holds_every_step(heads, max_requests, max_tokens, max_keys, table, data):
    shape = AttentionShape(*heads)
    room = AttentionWorkspace.sized(shape, table, max_requests, max_tokens, max_keys, "meta")
    requests, queries = data.draw(st.integers(1, max_requests)), data.draw(st.integers(1, max_tokens))
    tokens = data.draw(st.integers(max(requests, queries), max(requests, max_tokens)))
    launches = table(shape, requests, queries, max_keys, tokens)
    room.check(shape, launches, requests, tokens)
    for launch in launches:
        assert launch.block_q * shape.group <= launch.block_m
        assert 1 <= launch.splits <= MAX_SPLITS


def test_short_requests_leave_splits_empty(triton_device):
    table = changed(fast_launches, lambda launch: {"tile": 16, "splits": 4, "least_tiles": 3})
    check(DeviceCase(2, 1, 16, [(150, 1), (40, 1), (60, 1), (96, 1)]), triton_device, table)


@pytest.mark.parametrize(("requests", "splits", "least"), [(1, 32, 1), (8, 32, 1), (64, 8, 8), (256, 2, 8), (512, 1, 8)])
def test_the_fewer_requests_the_more_splits(requests, splits, least):
    (launch,) = fast_launches(AttentionShape(32, 8, 128, 2), requests, 1, 131_072, requests)
    assert (launch.splits, launch.least_tiles) == (splits, least)


def test_one_key_head_occupies_a_gpu():
    assert [fast_launches(AttentionShape(8, kv, 128, 2), 1, 1, 131_072, 1)[0].splits for kv in (1, 2, 4)] == [128, 128, 64]


@pytest.mark.parametrize(
    ("tokens", "keys", "splits"), [(100, 131_072, 16), (512, 131_072, 4), (4096, 131_072, 1), (100, 1024, 1)]
)
def test_a_short_prompt_behind_a_long_prefix_is_split(tokens, keys, splits):
    """100 tokens of 32 heads are 4 tiles for each of 8 key heads: 32 programs, were each to go through 100,000 keys alone."""
    _short, long = fast_launches(AttentionShape(32, 8, 128, 2), 1, tokens, keys, tokens)
    assert long.splits == splits and long.least_tiles == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        DeviceCase(4, 1, 16, [(300, 20), (0, 20), (40, 17)], pad_tokens=3),
        DeviceCase(1, 2, 16, [(290, 66)], window=150, sinks=True),
        DeviceCase(7, 1, 16, [(130, 40), (200, 1)], softcap=2.0, sinks=True),
    ],
    ids=["prefix", "window", "softcap"],
)
def test_long_requests_with_split_keys_equal_dense_attention(triton_device, case):
    """Also where a tile's keys are too few for all splits, or for more than one."""
    check(case, triton_device, small(4, least=3))


def test_whichever_program_arrives_last_merges_alike(triton_device, exact_rows):
    case, table = DeviceCase(4, 1, 16, [(150, 20), (90, 1)]), small(4)
    assert torch.equal(run(case, triton_device, table), run(case, triton_device, table))


def test_few_variants_serve_all_steps():
    """What is compiled beforehand is all that a request can meet."""
    shape = AttentionShape(32, 8, 128, 2)
    steps = [(requests, queries) for requests in range(1, 600, 7) for queries in range(1, 129)]
    found = {
        dataclasses.replace(launch, splits=min(launch.splits, 2), least_tiles=1)
        for requests, queries in steps
        for launch in fast_launches(shape, requests, queries, 32_768, 8 * requests + queries)
    }
    assert len(found) == 10  # four tiles of rows for short requests, one for long ones, each split or not


@pytest.mark.gpu
@pytest.mark.req("ATT-05", "ATT-06", "ATT-07", "ATT-08", "ATT-26")
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("table", [fast_launches, invariant_launches])
def test_real_sizes_equal_dense_attention(head_size, table):
    lengths = [(0, 7), (4000, 1), (0, 2000), (100, 130), (0, 0), (1, 1), (0, 0)]
    for dtype in TOLERANCE:
        for window, softcap, sinks in [(None, 0.0, False), (300, 30.0, False), (128, 0.0, True)]:
            case = DeviceCase(4, 2, head_size, lengths, 16, window, softcap, sinks, pad_tokens=9, dtype=dtype)
            check(case, "cuda", table)


@pytest.mark.gpu
@pytest.mark.req("ATT-18")
def test_splits_merge_exactly():
    case = DeviceCase(4, 8, 128, [(8000, 1), (63, 1), (64, 1), (5, 1), (0, 0), (511, 1)], dtype=torch.bfloat16)
    for splits in (1, 2, 5, 8, 32):
        check(case, "cuda", changed(fast_launches, lambda launch, splits=splits: {"splits": splits}))


@pytest.mark.gpu
@pytest.mark.req("ATT-14")
def test_one_graph_serves_every_length():
    case = DeviceCase(4, 2, 128, [(3000, 1), (17, 1), (900, 1), (0, 0)], dtype=torch.bfloat16)
    q, cache, batch = case.build("cuda")
    shape, max_keys = shape_of(case), 4096
    table = torch.zeros(8, max_keys // 16, dtype=torch.int32, device="cuda")
    table[: len(batch.block_table), : batch.block_table.shape[1]] = batch.block_table
    batch = dataclasses.replace(batch, block_table=table)
    room = AttentionWorkspace.sized(shape, fast_launches, 4, 4, max_keys, "cuda")

    def attend(of: DeviceBatch) -> torch.Tensor:
        return paged_attention(q, cache, of, case.scale, workspace=room)

    attend(batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(batch)
    for lens in ([3001, 18, 901, 0], [1, 1, 1, 1], [2048, 0, 16, 0], [64, 65, 63, 0]):
        batch.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        batch.rows.copy_(batch.rows.roll(1))
        cache.nan_to_num_()
        expected = attend(batch).clone()
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.gpu
def test_a_cache_of_more_than_two_billion_elements():
    case = DeviceCase(4, 8, 128, [(40, 1), (0, 70)], dtype=torch.bfloat16)
    q, cache, batch = case.build("cuda")
    far = torch.zeros(80_000, *cache.shape[1:], dtype=cache.dtype, device="cuda")
    far[-len(cache) :] = cache
    batch = dataclasses.replace(batch, block_table=batch.block_table + 80_000 - len(cache))
    out = paged_attention(q, far, batch, case.scale)
    torch.testing.assert_close(out.cpu().double(), case.dense(), rtol=3e-2, atol=3e-2)
