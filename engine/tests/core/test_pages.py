"""Pages that leave: what must be equal, and where the bytes are."""

import msgspec
import numpy as np
import pytest
import torch

from penstock.engine.attention.pages import plane_views
from penstock.engine.cache.layout import TOKENS, KVLayer, Plane, attention_plane, kv_layout
from penstock.engine.cache.pages import PageGeometry, PageIdentity, copies, kv_dtypes, overlapping, pieces
from penstock.engine.connectors.keepers import keeper_of

FULL = KVLayer(planes=(attention_plane(2, 8, "bfloat16"),))
WINDOW = KVLayer(planes=(attention_plane(2, 8, "bfloat16"),), window=20)
SCALED = KVLayer(planes=(attention_plane(2, 8, "int8"), Plane("scales", "float32", (2, 2, TOKENS))))
NUM_BLOCKS = 5


def geometry(layers: list[KVLayer], part: int = 0, parts: int = 1) -> PageGeometry:
    return PageGeometry(layers=tuple(layers), layout=kv_layout(layers, 4), part=part, parts=parts)


def views(of: PageGeometry, memory: torch.Tensor) -> list[tuple[int, dict[str, torch.Tensor]]]:
    """Per layer its group, and its planes as the kernels see them."""
    layout = of.layout
    pages = memory.view(NUM_BLOCKS, layout.num_slots, layout.slot_bytes)
    found = {}
    for number, group in enumerate(layout.groups):
        for slot, layer in enumerate(group.layers):
            found[layer] = (number, plane_views(pages[:, slot], of.layers[layer], group.block_size))
    return [found[layer] for layer in range(len(of.layers))]


@pytest.mark.parametrize(
    "layers", [[FULL] * 3, [FULL, WINDOW, WINDOW, WINDOW], [FULL, SCALED, SCALED]], ids=["full", "windows", "scales"]
)
def test_the_bytes_of_a_block_are_those_that_the_layers_see(layers):
    of = geometry(layers)
    for number, group in enumerate(of.layout.groups):
        memory = torch.zeros(NUM_BLOCKS * of.layout.page_bytes, dtype=torch.uint8)
        span = of.span(3, number)
        memory[span.start : span.stop] = 255
        for layer in group.layers:
            for plane in views(of, memory)[layer][1].values():
                raw = plane.contiguous().view(torch.uint8).view(NUM_BLOCKS, -1)
                assert (raw[3] == 255).all() and (raw[[0, 1, 2, 4]] == 0).all()
        held = sum(piece.size for piece in pieces(of, number))
        assert held <= len(span) and all(piece.begin + piece.size <= len(span) for piece in pieces(of, number))


def test_all_parts_of_a_page_lie_side_by_side_and_do_not_meet():
    layers = [FULL, WINDOW, WINDOW]
    taken: set[int] = set()
    for block in range(3):
        for part in range(2):
            span = geometry(layers, part, 2).span(block, 0)
            assert taken.isdisjoint(span)
            taken.update(span)
    layout = kv_layout(layers, 4)
    assert layout.span(1, 0, 0, 2).start == 2 * layout.page_bytes and layout.span(1, 0, 1, 2).start == 3 * layout.page_bytes


def test_a_page_is_copied_between_layouts_that_group_the_layers_differently():
    """At one end three layers see a window and at the other all of them see everything."""
    source, target = geometry([FULL, WINDOW, WINDOW, WINDOW]), geometry([FULL] * 4)
    assert source.layout.groups != target.layout.groups
    there = torch.zeros(NUM_BLOCKS * target.layout.page_bytes, dtype=torch.uint8)
    rng = np.random.default_rng(0)
    here = torch.from_numpy(rng.integers(0, 256, NUM_BLOCKS * source.layout.page_bytes, dtype=np.uint8))
    blocks = {number: 1 + number for number in range(len(source.layout.groups))}
    for number, block in blocks.items():
        begin = source.span(block, number).start
        for group, piece, place in copies(source, number, target):
            to = target.span(2, group).start + place.begin
            there[to : to + place.size] = here[begin + piece.begin : begin + piece.begin + piece.size]
    for (number, planes), (_, arrived) in zip(views(source, here), views(target, there), strict=True):
        assert torch.equal(planes["kv"][blocks[number]].view(torch.uint8), arrived["kv"][2].view(torch.uint8))


def heads(number: int, window: int | None = None) -> KVLayer:
    return KVLayer(planes=(attention_plane(number, 8, "bfloat16"),), window=window)


@pytest.mark.parametrize(("parts", "others"), [(1, 2), (2, 1), (2, 3), (6, 1), (3, 2)])
def test_heads_that_are_cut_otherwise_find_their_places(parts, others):
    """Six heads; in some cases, the layer of a draft model behind them, which no rank cuts."""
    whole = [heads(2)] if {parts, others} == {2, 3} else []

    def cut(of: int) -> list[PageGeometry]:
        return [geometry([heads(6 // of), heads(6 // of, 20), *whole], part, of) for part in range(of)]

    sources, targets = cut(parts), cut(others)
    assert sources[0].layout.groups == targets[0].layout.groups
    rng = np.random.default_rng(0)
    expected = [torch.from_numpy(rng.integers(0, 256, (2, number, 4, 16), np.uint8)) for number in (6, 6, 2)]

    def filled(of: PageGeometry) -> torch.Tensor:
        memory = torch.zeros(NUM_BLOCKS * of.layout.page_bytes, dtype=torch.uint8)
        for layer, (number, planes) in enumerate(views(of, memory)):
            planes["kv"].view(torch.uint8)[1 + number].copy_(part_of(of, layer))
        return memory

    def part_of(of: PageGeometry, layer: int) -> torch.Tensor:
        each = 6 // of.parts
        return expected[layer] if layer == 2 else expected[layer][:, of.part * each : (of.part + 1) * each]

    for target in targets:
        memory = torch.zeros(NUM_BLOCKS * target.layout.page_bytes, dtype=torch.uint8)
        for part in overlapping(target.part, others, parts):
            source, here = sources[part], filled(sources[part])
            for number in range(len(source.layout.groups)):
                for group, piece, place in copies(source, number, target):
                    begin = source.layout.span(1 + number, number).start + piece.begin
                    to = target.layout.span(1 + group, group).start + place.begin
                    memory[to : to + place.size] = here[begin : begin + piece.size]
        for layer, (number, planes) in enumerate(views(target, memory)):
            assert torch.equal(planes["kv"].view(torch.uint8)[1 + number], part_of(target, layer))


def test_ends_that_do_not_fit_are_refused_by_name():
    with pytest.raises(ValueError, match="part 0 of 2 has other heads than part 1 of 2"):
        list(copies(geometry([FULL], 0, 2), 0, geometry([FULL], 1, 2)))
    with pytest.raises(ValueError, match="part 0 of 3 has other heads than part 1 of 2"):
        list(copies(geometry([heads(2)], 0, 3), 0, geometry([heads(3)], 1, 2)))
    with pytest.raises(ValueError, match="layer 1 keeps 'kv' of another size or none"):
        list(copies(geometry([FULL, FULL]), 0, geometry([FULL, SCALED])))


@pytest.mark.parametrize(
    ("same", "per_node", "keepers"),
    [
        (1, 4, [0, 1, 2, 3]),
        (2, 4, [0, 0, 2, 2]),
        (4, 4, [0, 0, 0, 0]),
        (4, 2, [0, 0, 2, 2]),
        (3, 2, [0, 0, 2, 3, 4, 4]),
    ],
    ids=["heads of their own", "a head for two", "a latent", "a latent on two nodes", "a head across nodes"],
)
def test_the_first_of_a_nodes_ranks_that_have_the_same_pages_keeps_them(same, per_node, keepers):
    assert [keeper_of(rank, same, per_node) for rank in range(len(keepers))] == keepers


@pytest.mark.req("Q-19")
def test_a_page_is_read_only_where_all_that_decides_its_content_is_equal():
    layers = [FULL, SCALED]
    mine = PageIdentity(commit="abc", quantization="", kv_dtypes=kv_dtypes(layers), scales="")
    assert not mine.differences(msgspec.json.decode(msgspec.json.encode(mine), type=PageIdentity))
    others = {"commit": "abd", "quantization": "fp8", "kv_dtypes": kv_dtypes([FULL, FULL]), "scales": "7f", "images": "small"}
    assert others.keys() == set(PageIdentity.__struct_fields__)
    for name, value in others.items():
        (said,) = mine.differences(msgspec.structs.replace(mine, **{name: value}))
        assert said.startswith(name)
    assert "kv_dtypes '1 x kv:bfloat16, 1 x kv:int8 scales:float32' is not '2 x kv:bfloat16'" in mine.differences(
        msgspec.structs.replace(mine, kv_dtypes=kv_dtypes([FULL, FULL]))
    )
