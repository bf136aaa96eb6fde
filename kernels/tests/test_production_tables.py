"""Attention in bfloat16 with the tiles that real models get, against dense attention in float64.

Most tests of the kernels shrink tiles to 16 keys, since an interpreter is slow. Here nothing in the tables is changed. What is
small instead: each layer has one key head, a step has at most three requests, and a request has at most 2,148 keys. Long contexts
and many heads run on a GPU (`test_real_sizes_equal_dense_attention`).
"""

from dataclasses import dataclass

import pytest
import torch
from device_cases import DeviceCase
from test_triton_attention import check

from penstock.kernels.paged_attention.launch import AttentionShape, fast_launches, invariant_launches

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Geometry:
    """What tiles depend on, and what is in them."""

    group: int
    head_size: int
    block_size: int
    window: int | None = None
    softcap: float = 0.0

    def case(self, lengths: list[tuple[int, int]]) -> DeviceCase:
        """A step of one key head, with a padding token."""
        options = self.block_size, self.window, self.softcap
        return DeviceCase(self.group, 1, self.head_size, lengths, *options, pad_tokens=1, dtype=torch.bfloat16)


GEOMETRIES = {
    "Qwen3 0.6B": Geometry(2, 128, 16),
    "Llama 3.1 8B": Geometry(4, 128, 16),
    "Llama 3.1 8B, blocks of 64": Geometry(4, 128, 64),
    "Llama 3.1 70B, blocks of 64": Geometry(8, 128, 64),
    "Qwen2.5 14B, blocks of 24": Geometry(5, 128, 24),
    "Qwen2.5 32B, blocks of 128": Geometry(5, 128, 128),
    "Mistral 7B, a window, blocks of 128": Geometry(4, 128, 128, window=90),
    "Gemma 3 27B, a window, blocks of 24": Geometry(2, 128, 24, window=70),
    "Gemma 3 12B, a window": Geometry(2, 256, 16, window=90),
    "Gemma 2 9B, a window and soft caps, blocks of 64": Geometry(2, 256, 64, window=70, softcap=50.0),
    "Gemma 2B, blocks of 128": Geometry(8, 256, 128),
}
"""Windows are shorter than the models', so that contexts are longer than they."""

STEPS = {
    "decodes": [(170, 1), (64, 1), (0, 0)],
    "drafts": [(150, 8), (60, 2)],
    "mixed": [(1060, 40), (140, 1)],
}
"""Computed and new tokens. The longest prefix is so long that its keys are split, by the table's own rule."""

MAX_KEYS = 2048
"""Of a request, as the table is told: more would be more programs without any work."""


def in_production(table, max_keys=MAX_KEYS):
    """The table as a server asks it: block tables are as wide as the longest request."""
    return lambda shape, requests, queries, _max_keys, tokens: table(shape, requests, queries, max_keys, tokens)


@pytest.mark.req("ATT-05", "ATT-06", "ATT-07", "ATT-08")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_models_own_tiles_equal_dense_attention(triton_device, name, step):
    check(GEOMETRIES[name].case(STEPS[step]), triton_device, in_production(fast_launches))


@pytest.mark.parametrize("name", ["Llama 3.1 8B", "Gemma 2B, blocks of 128"])
def test_invariant_tiles_equal_dense_attention(triton_device, name):
    """Keys are split at their fixed position, 2,048."""
    case = GEOMETRIES[name].case([(2130, 18), (70, 1)])
    check(case, triton_device, in_production(invariant_launches, 4096))


def test_these_steps_have_every_tile_of_the_table():
    """Of models in 16 bits with heads of more than 64 elements. (Rows, keys, whether requests are searched, whether split.)"""
    found = set()
    for of in GEOMETRIES.values():
        for lengths in STEPS.values():
            shape, tokens = AttentionShape(of.group, 1, of.head_size, 2), sum(new for _, new in lengths) + 1
            for it in fast_launches(shape, len(lengths), max(new for _, new in lengths), MAX_KEYS, tokens):
                found.add((it.block_m, it.tile, it.search, it.splits > 1))
    short = {(rows, keys, False, True) for rows in (16, 32, 64) for keys in (64, 32)} - {(32, 32, False, True)}
    assert found == short | {(128, 64, True, True), (64, 32, True, True)}
