"""A prefix that all requests of a step of decodes share, read once: against dense attention, and when it pays."""

from dataclasses import replace

import pytest
import torch
from device_cases import DeviceCase
from test_triton_attention import TOLERANCE, small

from penstock.kernels.paged_attention import prefix as rule
from penstock.kernels.paged_attention import prefix_triton
from penstock.kernels.paged_attention.launch import AttentionShape, fast_launches
from penstock.kernels.paged_attention.prefix import LEAST_BYTES, SHARED_STEP, PrefixWorkspace, pays, prefix_launch
from penstock.kernels.paged_attention.triton import paged_attention

EIGHT_B = AttentionShape(32, 8, 128, 2)
TOKEN_BYTES = 2 * 8 * 128 * 2


def shared_case(case: DeviceCase, shared: int, device: str):
    """Queries, cache and batch: all requests have the first one's keys and values at first, and it alone has the blocks."""
    for i, (computed, _) in enumerate(case.lengths):
        if i and computed:
            case.keys[i][:shared], case.values[i][:shared] = case.keys[0][:shared], case.values[0][:shared]
    q, cache, batch = case.build(device)
    # Block 0 is full of NaN: whoever reads its own prefix has it in its result.
    batch.block_table[batch.rows[1:].long(), : shared // case.block_size] = 0
    return q, cache, replace(batch, shared=torch.tensor([shared], dtype=torch.int32, device=device))


def check(case: DeviceCase, shared: int, device: str, table=fast_launches) -> None:
    q, cache, batch = shared_case(case, shared, device)
    shape = AttentionShape(case.group * case.kv_heads, case.kv_heads, case.head_size, case.dtype.itemsize)
    room = PrefixWorkspace.sized(shape, batch.num_requests, batch.block_table.shape[1] * batch.block_size, device)
    for found in (room.values, room.lse, room.parts, room.parts_lse):
        found.fill_(float("nan"))
    given = None if case.sink is None else case.sink.to(device)
    scales = None if case.scales is None else case.scales.to(device)
    out = paged_attention(q, cache, batch, case.scale, case.softcap, given, table=table, prefix=room, scales=scales).cpu()
    assert not room.arrived.any(), "the next launch counts from nothing"
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(out.double(), case.dense(), rtol=tolerance, atol=tolerance)


@pytest.fixture
def prefix_splits(monkeypatch):
    """`prefix_splits(count)`: so many programs share a prefix's keys, which they take 16 at a time."""

    def set_to(count: int) -> None:
        def launch(*step):
            return replace(prefix_launch(*step), splits=count, tile=16, least_tiles=1)

        monkeypatch.setattr(prefix_triton, "prefix_launch", launch)
        monkeypatch.setattr(rule, "prefix_launch", launch)

    return set_to


REQUESTS = [(150, 1), (128, 1), (199, 1), (0, 0)]
"""One has its own token alone beside the prefix, one is nobody."""


@pytest.mark.parametrize(
    ("splits", "own", "case"),
    [
        (1, 2, DeviceCase(4, 2, 16, REQUESTS, pad_tokens=2)),
        (3, 1, DeviceCase(4, 2, 16, REQUESTS, pad_tokens=2)),
        (1, 1, DeviceCase(3, 1, 24, REQUESTS, sinks=True, block_size=8, softcap=0.7)),
        (3, 2, DeviceCase(3, 1, 24, REQUESTS, sinks=True, block_size=8, softcap=0.7)),
        (3, 2, DeviceCase(4, 1, 16, REQUESTS, dtype=torch.bfloat16)),
        (3, 1, DeviceCase(2, 1, 16, REQUESTS, dtype=torch.bfloat16, kept=torch.float8_e4m3fn)),
        (1, 2, DeviceCase(2, 1, 16, REQUESTS, dtype=torch.bfloat16, kept=torch.int8)),
    ],
    ids=["whole", "split", "sinks", "sinks-split", "bfloat16", "e4m3", "int8"],
)
def test_a_prefix_that_is_read_once_gives_dense_attention(triton_device, prefix_splits, splits, own, case):
    prefix_splits(splits)
    check(case, 128, triton_device, small(own))


def test_many_requests_are_several_tiles_of_rows(triton_device):
    """35 rows of two heads beyond a tile of 64, in the table's own tiles."""
    check(DeviceCase(2, 1, 16, [(128 + i % 3, 1) for i in range(35)]), 128, triton_device)


def test_nothing_shared_is_plain_attention(triton_device):
    """As in a graph whose step has nothing to share: what lies in the workspace is nobody's."""
    check(DeviceCase(4, 1, 16, [(20, 1), (7, 1)]), 0, triton_device, small(2))


def test_it_pays_where_programs_read_so_much_less():
    """Eight requests of a Llama 8B are one tile of 32 rows: seven of them read the prefix no more. Sixteen with 1,000 tokens read
    1,000 of them instead of 16,000."""
    assert prefix_launch(EIGHT_B, 16, 8192).block_q == 16 and pays(EIGHT_B, TOKEN_BYTES, 16, 1000 // SHARED_STEP * SHARED_STEP)
    assert prefix_launch(EIGHT_B, 8, 8192).block_q == 8
    enough = -(-LEAST_BYTES // (7 * TOKEN_BYTES))
    assert not pays(EIGHT_B, TOKEN_BYTES, 8, enough - SHARED_STEP) and pays(EIGHT_B, TOKEN_BYTES, 8, enough + SHARED_STEP)
    assert not pays(EIGHT_B, TOKEN_BYTES, 1, 1 << 20), "a lone request shares with nobody"
    assert pays(EIGHT_B, TOKEN_BYTES, 256, SHARED_STEP * 2) and not pays(EIGHT_B, TOKEN_BYTES, 256, 0)


def test_what_cannot_share_is_refused(triton_device):
    q, cache, batch = shared_case(DeviceCase(2, 1, 16, [(130, 1), (140, 1)]), 128, triton_device)
    for wrong in (replace(batch, window=20), replace(batch, max_query_len=2)):
        with pytest.raises(ValueError, match="one query, and without a window"):
            paged_attention(q, cache, wrong, 1.0)
    room = PrefixWorkspace.sized(AttentionShape(2, 1, 16, 4), 1, 160, triton_device)
    with pytest.raises(ValueError, match="too small for a prefix of 2 requests"):
        paged_attention(q, cache, batch, 1.0, prefix=room)


@pytest.mark.gpu
@pytest.mark.req("ATT-16")
@pytest.mark.parametrize("requests", [8, 64, 256])
def test_a_real_prefix_gives_dense_attention(requests):
    check(DeviceCase(4, 8, 128, [(4096 + 7 * i % 300, 1) for i in range(requests)], dtype=torch.bfloat16), 4096, "cuda")
