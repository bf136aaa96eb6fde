"""How attention is launched on a GPU: tables, not an autotuner, and none of them asks how long a request is.

A launch's grid is a function of the number of requests, of tokens and of heads, so that a graph captured once serves all lengths;
each program finds its request's share of keys when it runs. Where few requests would leave most of the GPU idle, their keys are
split over several programs, and a second, small kernel merges what those found.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

SMALL_ROWS = 64
"""Queries times heads of a group, up to which a request counts as decoding or verifying: one tile of rows, and split keys."""
MAX_SPLITS = 32
"""What the merging kernel takes in at once."""
_PROGRAMS = 4096
"""Programs, of 16 rows each, among which a step's keys are split at most: ten for each of the three that a multiprocessor of an
H200 runs at a time, so that a request much longer than the others is no long tail; those that find no work end at once."""
_INVARIANT_SPLITS = 8
_INVARIANT_SPLIT_TOKENS = 2048


@dataclass(frozen=True)
class AttentionShape:
    """One rank's heads."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    itemsize: int
    """Bytes an element of queries and cache."""

    @property
    def group(self) -> int:
        """Query heads a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded_head_size(self) -> int:
        """The power of two that holds a head."""
        return power_of_two(max(self.head_size, 16))


@dataclass(frozen=True)
class Launch:
    """One launch of the attention kernel; tiles are counted in rows (a query and one of its heads) and keys."""

    block_m: int
    """Rows of a program."""
    block_q: int
    """Queries of a program; times the heads of a group at most `block_m`."""
    tile: int
    """Keys that the rows meet at a time."""
    num_warps: int
    num_stages: int
    splits: int
    """Programs among which a tile's keys are split."""
    split_tokens: int
    """Keys a split, a multiple of `tile`; 0: the keys that there are in equal shares."""
    least_tiles: int
    """Tiles a split, at the least: a short request leaves some of its splits empty."""
    search: bool
    """Whether a program looks for its request, among requests of any length; else program i takes request i, if that is short
    enough for one program."""
    skip: int
    """With `search`: requests with so many queries or fewer are another launch's."""
    pads: bool
    """Whether the launch zeroes the padding tokens."""

    def slots(self, num_requests: int, num_tokens: int) -> int:
        """Queries for which there must be room in a workspace."""
        return num_tokens if self.search else num_requests * self.block_q

    def parts(self, num_requests: int, num_tokens: int) -> int:
        """Results of a head that splits leave in a workspace."""
        return self.slots(num_requests, num_tokens) * self.splits if self.splits > 1 else 0

    def blocks(self, num_requests: int, num_tokens: int) -> int:
        """Tiles of rows, some of them empty: as many as there can be, whatever the lengths are."""
        return (num_tokens // self.block_q if self.search else 0) + num_requests + self.pads


@lru_cache(maxsize=1024)
def fast_launches(shape: AttentionShape, num_requests: int, max_query_len: int, max_keys: int) -> tuple[Launch, ...]:
    """What a step's attention is made of: short requests with split keys; where there may be longer ones, those too.

    A decoding request is computed in the same way beside a prompt as without one.

    Args:
        shape: The heads.
        num_requests: Padding included.
        max_query_len: Of the step; only its class matters, so that few variants are ever compiled.
        max_keys: That a request can have at all.
    """
    rows = max_query_len * shape.group
    if max_query_len == 1 or rows <= SMALL_ROWS:
        return (_small(shape, num_requests, max_query_len == 1, rows, max_keys),)
    small = _small(shape, num_requests, False, shape.group, max_keys)
    block_m, tile, warps, stages = _prefill_tile(shape)
    block_m = max(block_m, power_of_two(shape.group))
    long = Launch(block_m, block_m // shape.group, tile, warps, stages, 1, 0, 1, search=True, skip=small.block_q, pads=False)
    return small, long


@lru_cache(maxsize=1024)
def invariant_launches(shape: AttentionShape, num_requests: int, max_query_len: int, max_keys: int) -> tuple[Launch, ...]:
    """One launch for everything, with keys split at fixed positions: a query's bits depend on its own request's tokens alone, not
    on neighbours, on chunks or on what was cached.

    It costs: a decoding request fills tiles of 64 rows with as few as one, at most eight programs a key head work on it however
    idle the GPU is, and the workspace holds `max_num_batched_tokens` · heads · splits · head size in float32.
    """
    width = shape.padded_head_size * shape.itemsize
    tile = 64 if width <= 256 else 32 if width <= 512 else 16  # so that three stages fit into shared memory
    splits = min(_INVARIANT_SPLITS, -(-max_keys // _INVARIANT_SPLIT_TOKENS))
    split_tokens = -(-max_keys // splits // tile) * tile if splits > 1 else 0
    block_m = max(64, power_of_two(shape.group))
    return (Launch(block_m, block_m // shape.group, tile, 8, 3, splits, split_tokens, 1, search=True, skip=0, pads=True),)


def _small(shape: AttentionShape, num_requests: int, decode: bool, rows: int, max_keys: int) -> Launch:
    block_m = max(16, power_of_two(rows))
    # Two tiles of keys and of values in 64 KiB, so that three programs share a multiprocessor; the third and fourth stage hold
    # block numbers.
    tile = max(16, min(128, 16384 // (shape.padded_head_size * shape.itemsize)))
    programs = num_requests * shape.num_kv_heads
    # Where there are many requests anyway, a split must be worth the merge.
    least = min(8, power_of_two(programs // 64))
    useful = power_of_two(-(-max_keys // (tile * least)))
    splits = min(MAX_SPLITS, useful, power_of_two(_PROGRAMS * 16 // (programs * block_m) + 1) // 2)
    block_q = 1 if decode else block_m // shape.group
    warps, stages = (8, 3) if block_m >= 64 else (4, 5)
    return Launch(block_m, block_q, tile, warps, stages, max(splits, 1), 0, least, search=False, skip=0, pads=True)


def _prefill_tile(shape: AttentionShape) -> tuple[int, int, int, int]:
    """Rows, keys, warps and stages."""
    if shape.itemsize == 4:  # each product takes three, and the registers for them
        return 16, 16, 4, 3
    if shape.padded_head_size <= 64:
        return 128, 128, 8, 3
    if shape.padded_head_size <= 128:
        return 128, 64, 8, 3
    return 128, 32, 8, 2


def attention_steps(max_num_requests: int, max_num_tokens: int, max_query_len: int) -> Iterator[list[int]]:
    """The lengths of requests in steps that between them launch every kernel variant of any step within the limits: decodes,
    drafts, and prompts short and long, alone and beside decodes.

    Args:
        max_num_requests: Of a step.
        max_num_tokens: Of a step.
        max_query_len: Of a request.
    """
    most = min(max_num_requests, max_num_tokens)
    powers = [1 << power for power in range(most.bit_length())]
    # A launch has the power of two that holds a request's rows, queries times heads: each such power has queries of one of these
    # numbers. Longer requests than the last are alike.
    queries = [1 << power for power in range(SMALL_ROWS.bit_length())] + [SMALL_ROWS + 1]
    # A launch's other numbers change at powers of two of requests, some of them just after.
    for requests in sorted({number for power in powers for number in (power, power + 1) if number <= most}):
        longest = min(max_query_len, max_num_tokens - requests + 1)
        yield from ([1] * (requests - 1) + [last] for last in sorted({min(number, longest) for number in queries}))


LaunchTable = Callable[[AttentionShape, int, int, int], tuple[Launch, ...]]
"""A step's launches from heads, requests, the greatest number of queries and the greatest number of keys."""


@dataclass(frozen=True)
class AttentionWorkspace:
    """Where splits leave what they found, for all layers in turn; allocated once, so that its address stays."""

    values: torch.Tensor
    """float32: a split's result by query slot, head, split and element."""
    lse: torch.Tensor
    """float32: the base-2 logarithm of a split's sum, by query slot, head and split; -inf where a split saw no key."""

    @staticmethod
    def of(shape: AttentionShape, parts: int, device: torch.device | str) -> "AttentionWorkspace":
        """Room for so many parts of each head."""
        values = torch.empty(parts * shape.num_heads, shape.head_size, dtype=torch.float32, device=device)
        return AttentionWorkspace(values, torch.empty(parts * shape.num_heads, dtype=torch.float32, device=device))

    @staticmethod
    def sized(
        shape: AttentionShape, table: LaunchTable, max_num_seqs: int, max_num_tokens: int, max_keys: int, device: str
    ) -> "AttentionWorkspace":
        """Room for every step of up to so many requests and tokens that is launched by a table."""
        parts = max(
            launch.parts(requests, max_num_tokens)
            for requests in range(1, max_num_seqs + 1)
            for queries in (1, max(1, SMALL_ROWS // shape.group), max_num_tokens)
            for launch in table(shape, requests, queries, max_keys)
        )
        return AttentionWorkspace.of(shape, parts, device)


def power_of_two(value: int) -> int:
    """The least one that is not below."""
    return 1 << max(value - 1, 0).bit_length()
