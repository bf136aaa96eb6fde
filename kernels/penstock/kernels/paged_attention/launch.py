"""How attention is launched on a GPU: tables, not an autotuner, and none of them asks how long a request is.

A launch's grid is a function of the number of requests, of tokens and of heads, so that a graph captured once serves all lengths;
each program finds its request's share of keys when it runs. Where few tiles of rows would leave most of the GPU idle, their keys
are split over several programs, of which the last to arrive merges what all have found.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

SMALL_ROWS = 64
"""Queries times heads of a group, up to which a request counts as decoding or verifying: one tile of rows, and split keys."""
MAX_SPLITS = 128
"""Programs among which a tile's keys are split at most: as many as a GPU has multiprocessors, for a lone tile of rows."""
_FEW_SPLITS = 32
"""Beyond it there are more only while there are fewer than two programs a multiprocessor: the merge takes in each."""
_LONG_PROGRAMS = 512
"""Programs of long requests among which keys are split: four for each multiprocessor, which runs one at a time."""
_LONG_LEAST_TILES = 16
"""Tiles a split of a long request, so that prompts without a long history are not split at all."""
_LONG_PARTS = 4096
"""Queries times splits of long requests at most, which bounds the workspace."""
_PROGRAMS = 4096
"""Programs, of 16 rows each, among which a step's keys are split at most: ten for each of the three that a multiprocessor of an
H200 runs at a time, so that a request much longer than the others is no long tail; those that find no work end at once."""
_STAGES = 5
"""Of the loop over keys, so that two tiles are on their way while one is worked on; the stages beyond hold block numbers. With
three, the loop waits for each tile that it has just asked for."""
_INVARIANT_SPLITS = 8
_INVARIANT_SPLIT_TOKENS = 2048


@dataclass(frozen=True)
class AttentionShape:
    """One rank's heads."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    itemsize: int
    """Bytes an element of queries."""
    row_scales: bool = False
    """Whether each row of the cache has a scale. Such rows are loaded four bytes at a time, which takes registers."""
    windowed: bool = False
    """Whether a query sees a window of keys alone."""

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
    gluon: bool = False
    """Whether the Gluon kernel of long prompts is launched."""

    def slots(self, num_requests: int, num_tokens: int) -> int:
        """Queries for which there must be room in a workspace."""
        return num_tokens if self.search else num_requests * self.block_q

    def parts(self, num_requests: int, num_tokens: int) -> int:
        """Results of a head that splits leave in a workspace."""
        return self.slots(num_requests, num_tokens) * self.splits if self.splits > 1 else 0

    def counters(self, shape: AttentionShape, num_requests: int, num_tokens: int) -> int:
        """Tiles whose programs count how many of them have arrived."""
        return self.blocks(num_requests, num_tokens) * shape.num_kv_heads if self.splits > 1 else 0

    def blocks(self, num_requests: int, num_tokens: int) -> int:
        """Tiles of rows, some of them empty: as many as there can be, whatever the lengths are."""
        return (num_tokens // self.block_q if self.search else 0) + num_requests + self.pads


@lru_cache(maxsize=1024)
def fast_launches(
    shape: AttentionShape, num_requests: int, max_query_len: int, max_keys: int, num_tokens: int
) -> tuple[Launch, ...]:
    """What a step's attention is made of: short requests with split keys; where there may be longer ones, those too.

    A decoding request is computed in the same way beside a prompt as without one.

    Args:
        shape: The heads.
        num_requests: Padding included.
        max_query_len: Of the step; only its class matters, so that few variants are ever compiled.
        max_keys: That a request can have at all.
        num_tokens: Padding included.
    """
    rows = max_query_len * shape.group
    if max_query_len == 1 or rows <= SMALL_ROWS:
        return (_small(shape, num_requests, max_query_len == 1, rows, max_keys),)
    small = _small(shape, num_requests, False, shape.group, max_keys)
    block_m, tile, warps, stages = _prefill_tile(shape)
    block_m = max(block_m, power_of_two(shape.group))
    block_q = block_m // shape.group
    splits = _long_splits(shape, num_tokens, block_q, -(-max_keys // (tile * _LONG_LEAST_TILES)))
    return small, Launch(
        block_m, block_q, tile, warps, stages, splits, 0, _LONG_LEAST_TILES, search=True, skip=small.block_q, pads=False
    )


@lru_cache(maxsize=1024)
def gluon_launches(
    shape: AttentionShape, num_requests: int, max_query_len: int, max_keys: int, num_tokens: int
) -> tuple[Launch, ...]:
    """As `fast_launches`, but long requests whose keys are not split are the Gluon kernel's, unless they have windows."""
    *others, last = fast_launches(shape, num_requests, max_query_len, max_keys, num_tokens)
    if last.search and last.splits == 1 and not shape.windowed:
        rows, stages = 128, 2 if shape.head_size == 128 else 4
        last = replace(last, block_m=rows, block_q=rows // shape.group, tile=128, num_warps=4, num_stages=stages, gluon=True)
    return *others, last


@lru_cache(maxsize=1024)
def invariant_launches(
    shape: AttentionShape, num_requests: int, max_query_len: int, max_keys: int, num_tokens: int
) -> tuple[Launch, ...]:
    """One launch for everything, with keys split at fixed positions: a query's bits depend on its own request's tokens alone, not
    on neighbours, on chunks or on what was cached.

    It costs: a decoding request fills tiles of 64 rows with as few as one, at most eight programs a key head work on it however
    idle the GPU is, and the workspace holds `max_num_batched_tokens` · heads · splits · head size in float32.
    """
    width = shape.padded_head_size * shape.itemsize
    tile = 64 if width <= 256 else 32 if width <= 512 else 16  # so that the stages fit into shared memory
    splits = min(_INVARIANT_SPLITS, -(-max_keys // _INVARIANT_SPLIT_TOKENS))
    split_tokens = -(-max_keys // splits // tile) * tile if splits > 1 else 0
    block_m = max(64, power_of_two(shape.group))
    return (Launch(block_m, block_m // shape.group, tile, 8, _STAGES, splits, split_tokens, 1, search=True, skip=0, pads=True),)


def _small(shape: AttentionShape, num_requests: int, decode: bool, rows: int, max_keys: int) -> Launch:
    block_m = max(16, power_of_two(rows))
    # Two tiles of keys and of values in 64 KiB, so that three programs share a multiprocessor.
    tile = max(16, min(128, 16384 // (shape.padded_head_size * shape.itemsize)))
    programs = num_requests * shape.num_kv_heads
    # Where there are many requests anyway, a split must be worth the merge.
    least = min(8, power_of_two(programs // 64))
    useful = power_of_two(-(-max_keys // (tile * least)))
    most = min(MAX_SPLITS, max(_FEW_SPLITS, floor_power_of_two(256 // programs)))
    splits = min(most, useful, floor_power_of_two(_PROGRAMS * 16 // (programs * block_m)))
    block_q = 1 if decode else block_m // shape.group
    warps = 8 if block_m >= (32 if shape.row_scales else 64) else 4
    return Launch(block_m, block_q, tile, warps, _STAGES, max(splits, 1), 0, least, search=False, skip=0, pads=True)


def _long_splits(shape: AttentionShape, num_tokens: int, block_q: int, useful: int) -> int:
    """How often the keys of long requests are split, where one has so many tokens, or several have them together."""
    programs = -(-num_tokens // block_q) * shape.num_kv_heads
    return max(1, min(useful, floor_power_of_two(_LONG_PROGRAMS // programs), floor_power_of_two(_LONG_PARTS // num_tokens)))


def merge_chunk(row_elements: int, num_warps: int) -> int:
    """Splits whose results a merge takes in at once, of so many elements each: what 64 registers a thread hold."""
    return max(1, min(32, 64 * 32 * num_warps // row_elements))


def _prefill_tile(shape: AttentionShape) -> tuple[int, int, int, int]:
    """Rows, keys, warps and stages."""
    if shape.itemsize == 4:  # each product takes three, and the registers for them
        return 16, 16, 4, 3
    if shape.padded_head_size <= 64:
        return 128, 128, 8, _STAGES
    if shape.padded_head_size <= 128:
        return 128, 64, 8, _STAGES
    return 64, 32, 8, _STAGES


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
    # With fewer tokens the keys of long requests are split, with the most they are not.
    yield [min(max_query_len, max_num_tokens)]
    # A launch's other numbers change at powers of two of requests, some of them just after.
    for requests in sorted({number for power in powers for number in (power, power + 1) if number <= most}):
        longest = min(max_query_len, max_num_tokens - requests + 1)
        yield from ([1] * (requests - 1) + [last] for last in sorted({min(number, longest) for number in queries}))


LaunchTable = Callable[[AttentionShape, int, int, int, int], tuple[Launch, ...]]
"""A step's launches from heads, requests, the greatest number of queries, the greatest number of keys, and tokens."""


@dataclass(frozen=True)
class AttentionWorkspace:
    """Where splits leave what they found, for all layers in turn; allocated once, so that its address stays."""

    values: torch.Tensor
    """float32: a split's result by query slot, head, split and element."""
    lse: torch.Tensor
    """float32: the base-2 logarithm of a split's sum, by query slot, head and split; -inf where a split saw no key."""

    arrived: torch.Tensor
    """int32: how many of a tile's programs have left what they found; 0 before a launch, and after it."""

    @staticmethod
    def of(
        shape: AttentionShape, launches: Iterable[Launch], num_requests: int, num_tokens: int, device: torch.device | str
    ) -> "AttentionWorkspace":
        """Room for a step."""
        parts, counters = _needed(shape, launches, num_requests, num_tokens)
        return AttentionWorkspace.allocated(parts * shape.num_heads, shape.head_size, counters, device)

    @staticmethod
    def sized(
        shape: AttentionShape, table: LaunchTable, max_num_seqs: int, max_num_tokens: int, max_keys: int, device: str
    ) -> "AttentionWorkspace":
        """Room for every step of up to so many requests and tokens that is launched by a table."""
        queries = (1, max(1, SMALL_ROWS // shape.group), max_num_tokens)
        steps = [(requests, most, max_num_tokens) for requests in range(1, max_num_seqs + 1) for most in queries]
        # Long requests have the more splits the fewer tokens there are.
        steps += [(max_num_seqs, max_num_tokens, number) for number in range(1, min(_LONG_PARTS, max_num_tokens) + 1)]
        found = [_needed(shape, table(shape, r, most, max_keys, number), r, number) for r, most, number in steps]
        parts, counters = (max(column) for column in zip(*found, strict=True))
        return AttentionWorkspace.allocated(parts * shape.num_heads, shape.head_size, counters, device)

    @staticmethod
    def allocated(parts: int, size: int, counters: int, device: torch.device | str) -> "AttentionWorkspace":
        """Room for so many parts of all heads together, of so many elements each, and for so many counters."""
        values = torch.empty(parts, size, dtype=torch.float32, device=device)
        lse = torch.empty(parts, dtype=torch.float32, device=device)
        return AttentionWorkspace(values, lse, torch.zeros(counters, dtype=torch.int32, device=device))

    def holds(self, parts: int, counters: int) -> bool:
        """Whether there is room for so many."""
        return parts <= self.lse.shape[0] and counters <= self.arrived.shape[0]

    def check(self, shape: AttentionShape, launches: Iterable[Launch], num_requests: int, num_tokens: int) -> None:
        """ValueError where it is too small for a step."""
        parts, counters = _needed(shape, launches, num_requests, num_tokens)
        if not self.holds(parts * shape.num_heads, counters):
            raise ValueError(f"the workspace is too small for {num_requests} requests and {num_tokens} tokens")


def _needed(shape: AttentionShape, launches: Iterable[Launch], num_requests: int, num_tokens: int) -> tuple[int, int]:
    """Parts of a head, and counters."""
    sizes = [(it.parts(num_requests, num_tokens), it.counters(shape, num_requests, num_tokens)) for it in launches]
    return max(parts for parts, _ in sizes), max(counters for _, counters in sizes)


def power_of_two(value: int) -> int:
    """The least one that is not below."""
    return 1 << max(value - 1, 0).bit_length()


def floor_power_of_two(value: int) -> int:
    """The greatest power of two that is not above; 0 of 0."""
    return power_of_two(value + 1) // 2
