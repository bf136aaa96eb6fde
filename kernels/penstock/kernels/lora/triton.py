"""Low-rank adapters on a GPU, many in a batch (as in Punica, Chen et al., 2023, and S-LoRA, Sheng et al., 2023), in two launches.

    shrink   program (16 tokens, some ranks, a split of the inputs):   low = x · Aᵀ, a partial sum in float32
    expand   program (16 tokens, 64 outputs of one projection):        y += (sum of the partial ones) · Bᵀ

Tokens are not sorted by adapter. A program finds the slots among its own tokens, from the greatest down, and takes one product
for each, in which the rows of other slots are zero: a prompt's tokens have one slot, so that nothing is wasted on them; decodes
of many adapters waste arithmetic alone, which their memory traffic hides. So the grid depends on the number of tokens and on
nothing else, nothing has to be prepared for a step but each token's slot, and a graph that is captured once serves every mix of
adapters. A step without any leaves at once.
"""

# pyright: reportCallIssue=false
# Triton types a launch without its options.

import torch
import triton
import triton.language as tl

from penstock.kernels.dependent_launch import early, wait
from penstock.kernels.lora.device import OUTPUT_TILE, DeviceLoraBatch, DeviceLoraShelves

_SPLITS = 8
"""Parts of the inputs, at most, which programs of their own take in the first launch where tokens are few: so a lone tile has
enough of them to wait for memory side by side."""
_INPUTS = 128
"""That such a program takes at a time."""
_RANKS = 64, 32
"""At most, at a time, in the first launch and in the second."""
_FEW_TOKENS = 256
"""Up to here tiles are 16 tokens, beyond 64."""


@triton.jit(do_not_specialize=["tokens"])
def _lora_shrink_kernel(
    x, a, slots, low, tokens, x_stride, IN: tl.constexpr, RANKS: tl.constexpr,
    TILE: tl.constexpr, RANK_TILE: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    rank = tl.program_id(1) * RANK_TILE + tl.arange(0, RANK_TILE)
    split = tl.program_id(2)
    slot = tl.load(slots + token, token < tokens, -1)
    row = token.to(tl.int64)[:, None]
    current = tl.max(slot, 0)
    while current >= 0:
        mine = slot == current
        total = tl.zeros((TILE, RANK_TILE), tl.float32)
        factors = a + current.to(tl.int64) * (RANKS * IN)
        for first in range(0, SPLIT, BLOCK):
            at = split * SPLIT + first + tl.arange(0, BLOCK)
            inputs = tl.load(x + row * x_stride + at[None, :], mine[:, None] & (at < IN)[None, :], 0.0)
            weights = tl.load(factors + rank[None, :] * IN + at[:, None], (at < IN)[:, None], 0.0)
            total = tl.dot(inputs, weights, total, input_precision="ieee")
        target = low + (split * tokens.to(tl.int64) + row) * RANKS + rank[None, :]
        tl.store(target, total, mine[:, None])
        current = tl.max(tl.where(slot < current, slot, -1), 0)


@triton.jit(do_not_specialize=["tokens"])
def _lora_expand_kernel(
    y, b, slots, low, tiles, tokens, y_stride, outputs, RANKS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
    TILE: tl.constexpr, OUTPUTS: tl.constexpr, RANK_TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    slot = tl.load(slots + token, token < tokens, -1)
    current = tl.max(slot, 0)
    if current >= 0:
        row = token.to(tl.int64)[:, None]
        tile = tiles + tl.program_id(1) * 4
        column, first, count, part = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
        output = tl.arange(0, OUTPUTS)
        total = tl.zeros((TILE, OUTPUTS), tl.float32)
        while current >= 0:
            mine = slot == current
            factors = b + (current.to(tl.int64) * outputs + first) * WIDTH
            for ranks in range(0, WIDTH, RANK_TILE):
                rank = ranks + tl.arange(0, RANK_TILE)
                narrow = tl.zeros((TILE, RANK_TILE), tl.float32)
                for split in tl.static_range(SPLITS):
                    source = low + (split * tokens.to(tl.int64) + row) * RANKS + part * WIDTH + rank[None, :]
                    narrow += tl.load(source, mine[:, None], 0.0)
                weights = tl.load(factors + output[None, :] * WIDTH + rank[:, None], (output < count)[None, :], 0.0)
                total = tl.dot(narrow.to(weights.dtype), weights, total, input_precision="ieee")
            current = tl.max(tl.where(slot < current, slot, -1), 0)
        inside = (slot >= 0)[:, None] & (output < count)[None, :]
        target = y + row * y_stride + column + output[None, :]
        tl.store(target, tl.load(target, inside, 0.0).to(tl.float32) + total, inside)


def add_lora(y: torch.Tensor, x: torch.Tensor, shelves: DeviceLoraShelves, batch: DeviceLoraBatch) -> None:
    """See `device_reference`; rows of x and y may lie apart. What is between the two products is rounded to the model's dtype."""
    tokens, inputs = x.shape
    if not tokens:
        return
    ranks, width = shelves.a.shape[1], shelves.width
    tile, splits = (16, _SPLITS) if tokens <= _FEW_TOKENS else (64, 1)
    part = -(-inputs // (splits * _INPUTS)) * _INPUTS
    splits = -(-inputs // part)
    low = torch.empty(splits, tokens, ranks, dtype=torch.float32, device=x.device)
    tiles, rank_tiles = triton.cdiv(tokens, tile), [min(width, most) for most in _RANKS]
    _lora_shrink_kernel[(tiles, ranks // rank_tiles[0], splits)](
        *(x, shelves.a, batch.token_slots, low, tokens, x.stride(0)),
        IN=inputs,
        RANKS=ranks,
        TILE=tile,
        RANK_TILE=rank_tiles[0],
        SPLIT=part,
        BLOCK=_INPUTS,
        **early(x.device),
        num_warps=4,
    )
    _lora_expand_kernel[(tiles, shelves.tiles.shape[0])](
        *(y, shelves.b, batch.token_slots, low, shelves.tiles, tokens, y.stride(0), shelves.b.shape[1]),
        RANKS=ranks,
        WIDTH=width,
        SPLITS=splits,
        TILE=tile,
        OUTPUTS=OUTPUT_TILE,
        RANK_TILE=rank_tiles[1],
        **early(x.device),
        num_warps=4,
        # Few products: nothing to prepare while another runs, and stages would take a copy of each partial sum.
        num_stages=1,
    )
