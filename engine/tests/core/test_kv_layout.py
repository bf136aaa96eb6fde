"""How layers share pages, and what sequences need of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.cache.layout import KVGroup, KVLayer, KVLayout, full_attention, kv_layout, longest_sequence, max_blocks
from penstock.engine.config import ConfigError


def layer(window=None, *, heads=8, size=128, dtype_bytes=2) -> KVLayer:
    return KVLayer(num_kv_heads=heads, head_size=size, dtype_bytes=dtype_bytes, window=window)


def shape(layout: KVLayout) -> list[tuple[int | None, int, tuple[int, ...]]]:
    return [(group.window, group.block_size, group.layers) for group in layout.groups]


@pytest.mark.req("KV-02", "KV-03")
@pytest.mark.parametrize(("dtype_bytes", "per_token"), [(2, 131_072), (1, 65_536)])
def test_a_page_is_two_times_tokens_heads_sizes_and_bytes_of_each_layer(dtype_bytes, per_token):
    """Llama 3 8B's shape: 128 KiB a token in bfloat16, half of it in FP8."""
    layout = kv_layout([layer(dtype_bytes=dtype_bytes)] * 32, 16)
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
    assert layout.page_bytes == 2 * 16 * layer().bytes_per_token
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
    with pytest.raises(ConfigError, match="layer 1 keeps 2560 bytes of a token and another one 4096"):
        kv_layout([layer(), layer(heads=5)], 16)


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
