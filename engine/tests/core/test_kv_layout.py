"""How layers share pages, and what sequences need of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.attention.pages import plane_views
from penstock.engine.cache.layout import (
    TOKENS,
    KVGroup,
    KVLayer,
    KVLayout,
    Plane,
    attention_plane,
    full_attention,
    kv_layout,
    longest_sequence,
    max_blocks,
)


def layer(window=None, *, heads=8, size=128, dtype="bfloat16") -> KVLayer:
    return KVLayer(planes=(attention_plane(heads, size, dtype),), window=window)


LATENT = KVLayer(planes=(Plane("latent", "bfloat16", (TOKENS, 576)),))
SCALED = KVLayer(
    planes=(attention_plane(8, 128, "int8"), Plane("scales", "float32", (2, 8, TOKENS)), Plane("seen", "uint8", (3,)))
)


def shape(layout: KVLayout) -> list[tuple[int | None, int, tuple[int, ...]]]:
    return [(group.window, group.block_size, group.layers) for group in layout.groups]


@pytest.mark.req("KV-02", "KV-03")
@pytest.mark.parametrize(("dtype", "dtype_bytes", "per_token"), [("bfloat16", 2, 131_072), ("float8_e4m3fn", 1, 65_536)])
def test_a_page_is_two_times_tokens_heads_sizes_and_bytes_of_each_layer(dtype, dtype_bytes, per_token):
    """Llama 3 8B's shape: 128 KiB a token in bfloat16, half of it in FP8."""
    layout = kv_layout([layer(dtype=dtype)] * 32, 16)
    assert layout.page_bytes == 2 * 16 * 8 * 128 * dtype_bytes * 32 == 16 * per_token
    assert layout.groups == (KVGroup(tuple(range(32)), 16, None),)


@pytest.mark.req("KV-22")
def test_layers_that_see_the_same_form_groups_of_equal_size():
    # As Gemma 2: every other layer.
    assert shape(kv_layout([layer(64), layer()] * 3, 16)) == [(None, 16, (1, 3, 5)), (64, 16, (0, 2, 4))]
    # As Gemma 3: five of six, and a rest.
    layers = ([layer(64)] * 5 + [layer()]) * 2 + [layer(64)]
    layout = kv_layout(layers, 16)
    assert shape(layout) == [
        (None, 16, (5, 11)),
        *[(64, 16, pair) for pair in ((0, 1), (2, 3), (4, 6), (7, 8), (9, 10), (12,))],
    ]
    assert layout.page_bytes == 2 * layer().offsets(16)[-1]
    assert layout.layer_groups == [1, 1, 2, 2, 3, 0, 3, 4, 4, 5, 5, 0, 6]
    # One more of one kind: a slot stays empty rather than four tables.
    assert shape(kv_layout([layer(64)] * 5 + [layer()] * 4, 16)) == [(None, 16, (5, 6, 7, 8)), (64, 16, (0, 1, 2, 3, 4))]


@pytest.mark.req("KV-23")
def test_layers_that_keep_less_have_longer_blocks():
    assert shape(kv_layout([layer(), layer(heads=4), layer(heads=2)], 16)) == [
        (None, 16, (0,)),
        (None, 32, (1,)),
        (None, 64, (2,)),
    ]


def test_a_draft_model_does_not_split_its_targets_layers_where_a_page_of_each_is_no_larger():
    assert shape(kv_layout([layer()] * 4 + [layer(heads=4)] * 3, 16)) == [(None, 16, (0, 1, 2, 3)), (None, 32, (4, 5, 6))]
    assert len(kv_layout([layer()] * 32 + [layer(heads=4)] * 6, 16).groups) == 7, "26 of 32 slots would stay empty"


@pytest.mark.req("KV-23")
def test_slots_are_padded_where_bytes_do_not_divide():
    layout = kv_layout([layer(), layer(heads=5), layer(heads=3), LATENT], 16)
    assert shape(layout) == [(None, 16, (0,)), (None, 16, (1,)), (None, 32, (2,)), (None, 48, (3,))]
    assert layout.page_bytes == layout.slot_bytes == 16 * 4096 >= 48 * 576 * 2


def test_a_layer_without_an_entry_for_each_token_keeps_the_block_size():
    state = KVLayer(planes=(Plane("state", "float32", (4, 64, 64)),))
    assert shape(kv_layout([layer(), state], 16)) == [(None, 16, (0, 1))]


def test_planes_of_a_block_do_not_overlap():
    """In bytes that are written: every plane of every layer in the pages of one pool."""
    layers, blocks = [layer(), LATENT, SCALED], 3
    layout = kv_layout(layers, 16)
    pages = torch.zeros(blocks, layout.num_slots, layout.slot_bytes, dtype=torch.uint8)
    views = {
        (index, name): view
        for group in layout.groups
        for slot, index in enumerate(group.layers)
        for name, view in plane_views(pages[:, slot], layers[index], group.block_size).items()
    }
    sizes = {index: group.block_size for group in layout.groups for index in group.layers}
    assert views[0, "kv"].shape == (3, 2, 8, 16, 128) and views[0, "kv"].dtype == torch.bfloat16
    assert views[1, "latent"].shape == (3, sizes[1], 576) and sizes[1] == 48
    assert views[2, "scales"].shape == (3, 2, 8, sizes[2]) and views[2, "scales"].dtype == torch.float32
    assert views[2, "seen"].shape == (3, 3) and sizes[2] == 16
    for index in range(len(layers)):
        pages.zero_()
        own = [view for (of, _), view in views.items() if of == index]
        for number, view in enumerate(own, 1):
            view[1] = number
        assert all(bool((view[1] == number).all()) for number, view in enumerate(own, 1))
        assert not any(bool(view[block].any()) for view in own for block in (0, 2))


groups = st.lists(
    st.builds(KVGroup, st.just((0,)), st.sampled_from([4, 8]), st.none() | st.integers(1, 40)), min_size=1, max_size=3
)


@pytest.mark.req("KV-04")
@given(groups, st.integers(1, 40), st.integers(0, 60), st.integers(1, 200))
def test_the_longest_sequence_is_the_longest(specs, in_flight, num_blocks, limit):
    fits = [length for length in range(1, limit + 1) if max_blocks(specs, length, in_flight) <= num_blocks]
    assert longest_sequence(specs, num_blocks, in_flight, limit) == len(fits)
    assert fits == list(range(1, len(fits) + 1))


@pytest.mark.req("KV-04")
def test_a_window_bounds_what_a_sequence_holds():
    assert max_blocks(full_attention(16), 10_000, 16) == 625
    assert max_blocks([KVGroup((0,), 16, 64)], 10_000, 16) == 64 // 16 + 2
    assert max_blocks([KVGroup((0,), 16, 64)], 33, 16) == 3
