"""How latent attention is launched on a GPU: how many heads a program takes, and among how many programs keys are split.

As `launch` has it, no length is asked: the numbers follow from heads and tokens alone.
"""

from dataclasses import dataclass

import torch

from penstock.kernels.paged_attention.launch import AttentionWorkspace, floor_power_of_two, power_of_two

HEADS, MANY_HEADS = 16, 64
"""Of a program. All heads meet the same keys, which many read a quarter as often, by Hopper's own matrix products; few leave room
for two programs a multiprocessor."""
TILE = 32
"""Keys that a program's heads meet at a time."""
_LEAST_PROGRAMS = 128
"""Of many heads at least, that nearly every multiprocessor has one."""
_SPLIT_PROGRAMS = 256
"""Programs among which a step's keys are split at most: two a multiprocessor. It bounds the workspace."""
_MAX_SPLITS = 32
"""Of a tile of heads: one program merges what they leave, 32 KiB each of 16 heads and a latent of 512."""
_LEAST_TILES = 8
"""Tiles a split, so that a short request writes its result at once."""


@dataclass(frozen=True)
class LatentLaunch:
    """A program takes one token and so many heads, and a share of the token's keys."""

    block_h: int
    """Heads of a program."""
    splits: int
    """Programs among which the keys of a token are split."""
    least_tiles: int = _LEAST_TILES
    """Tiles a split, at the least: short requests leave some of their splits empty."""

    def parts(self, tokens: int) -> int:
        """Results of a head that splits leave in a workspace."""
        return tokens * self.splits if self.splits > 1 else 0

    def counters(self, heads: int, tokens: int) -> int:
        """Tiles of heads whose programs count how many of them have arrived."""
        return tokens * -(-heads // self.block_h) if self.splits > 1 else 0


def latent_launch(heads: int, tokens: int, itemsize: int, max_keys: int, invariant: bool) -> LatentLaunch:
    """A step's launch.

    Args:
        heads: Of a query.
        tokens: Of the step, padding included.
        itemsize: Bytes of an element of the cache: numbers that are widened take the registers of many heads.
        max_keys: That a request can have at all.
        invariant: Whether a request's bits must not depend on the tokens beside it.
    """
    if invariant:
        return LatentLaunch(HEADS, 1)
    many = heads >= MANY_HEADS and itemsize == 2 and tokens * -(-heads // MANY_HEADS) >= _LEAST_PROGRAMS
    block_h = MANY_HEADS if many else HEADS
    share = _SPLIT_PROGRAMS // (tokens * -(-heads // block_h))
    useful = power_of_two(-(-max_keys // (TILE * _LEAST_TILES)))
    return LatentLaunch(block_h, max(1, min(_MAX_SPLITS, useful, floor_power_of_two(share))))


def latent_workspace(
    launches: dict[int, LatentLaunch], heads: int, value_size: int, device: torch.device | str
) -> AttentionWorkspace:
    """Room for each of some launches, by tokens of its step."""
    parts = heads * max(launch.parts(tokens) for tokens, launch in launches.items())
    counters = max(launch.counters(heads, tokens) for tokens, launch in launches.items())
    return AttentionWorkspace.allocated(parts, value_size, counters, device)


def sized_latent_workspace(
    heads: int, value_size: int, itemsize: int, max_num_tokens: int, max_keys: int, invariant: bool, device: str
) -> AttentionWorkspace:
    """Room for every step of up to so many tokens."""
    # With more tokens there are no splits.
    most = min(max_num_tokens, _SPLIT_PROGRAMS)
    launches = {tokens: latent_launch(heads, tokens, itemsize, max_keys, invariant) for tokens in range(1, most + 1)}
    return latent_workspace(launches, heads, value_size, device)
