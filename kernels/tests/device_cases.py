"""Requests for attention on a device: random queries, keys and values in random blocks of a cache that is NaN elsewhere.

In a cache of eight bits every byte elsewhere is 0xFF: NaN in both formats of floating-point numbers, and as a row's scale.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from penstock.kernels.paged_attention.device_batch import DeviceBatch
from penstock.kernels.prepare_kv.cache_rows import FLOATS_OF_EIGHT_BITS, from_rows, row_size, to_rows

SPARE_ROWS = 2


@dataclass
class DeviceCase:
    """What a step is made of; padding requests and tokens come last."""

    group: int
    kv_heads: int
    head_size: int
    lengths: list[tuple[int, int]]
    """Computed and new tokens of each request; (0, 0): a padding request with one query."""
    block_size: int = 16
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    pad_tokens: int = 0
    seed: int = 0
    dtype: torch.dtype = torch.float32
    kept: torch.dtype | None = None
    """Of a cache of eight bits; None: `dtype`."""
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        heads = self.group * self.kv_heads
        self.keys, self.values = ([self._random(a + b, self.kv_heads) for a, b in self.lengths] for _ in range(2))
        self.scales = None
        if self.kept is not None:
            # Of magnitudes that differ by token, so that no row has another's scale.
            for part in (*self.keys, *self.values):
                part *= torch.from_numpy(2.0 ** self.rng.integers(-3, 3, (*part.shape[:2], 1))).to(self.dtype)
            if self.kept in FLOATS_OF_EIGHT_BITS:
                self.scales = torch.from_numpy(self.rng.uniform(0.3, 4.0, (2, self.kv_heads)).astype(np.float32))
        self.queries = [self._random(max(new, 1 if not computed else 0), heads) for computed, new in self.lengths]
        self.sink = self._random(heads, 1)[:, 0, 0].float().contiguous() if self.sinks else None
        self.scale = self.head_size**-0.5

    def _random(self, length: int, heads: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal((length, heads, self.head_size), np.float32)).to(self.dtype)

    def _rows(self, i: int, side: int) -> torch.Tensor:
        """What the cache holds of a request's keys (0) or values (1)."""
        x = (self.keys, self.values)[side][i]
        if not len(x):
            return torch.empty(0, self.kv_heads, row_size(self.head_size, self.kept or self.dtype), dtype=self.kept or self.dtype)
        scaled = x if self.scales is None else x / self.scales[side, :, None]
        return to_rows(scaled, self.kept or self.dtype)

    def _held(self, i: int, side: int) -> torch.Tensor:
        """The keys or values that they stand for, in float64."""
        held = from_rows(self._rows(i, side), self.head_size).double()
        return held if self.scales is None else held * self.scales[side, :, None].double()

    def build(self, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, DeviceBatch]:
        """q, a layer's strided view of pages that hold two layers, and the batch."""
        rows = self.rng.permutation(len(self.lengths) + SPARE_ROWS)[: len(self.lengths)]
        blocks = [-(-(a + b) // self.block_size) for a, b in self.lengths]
        num_blocks = sum(blocks) + 2
        kept = self.kept or self.dtype
        shape = (num_blocks, 2, 2, self.kv_heads, self.block_size, row_size(self.head_size, kept))
        pages = torch.full(shape, float("nan"), dtype=kept) if self.kept is None else torch.full(shape, -1, dtype=torch.int8)
        cache = pages[:, 1]
        free = list(self.rng.permutation(np.arange(1, num_blocks)))
        # Entries of no meaning name blocks that exist.
        table = self.rng.integers(0, num_blocks, (len(self.lengths) + SPARE_ROWS, max([*blocks, 1]) + 1)).astype(np.int32)
        for i, (computed, new) in enumerate(self.lengths):
            own = [int(free.pop()) for _ in range(blocks[i])]
            rows_of = [self._rows(i, side).view(pages.dtype) for side in (0, 1)]
            first = 0 if self.window is None else max(0, computed - self.window + 1)
            for block, where in enumerate(own):
                begin, end = block * self.block_size, min((block + 1) * self.block_size, computed + new)
                if end <= first:
                    own[block] = 0
                    continue
                begin = max(begin, first)
                at = slice(begin - block * self.block_size, end - block * self.block_size)
                for side in (0, 1):
                    cache[where, side, :, at] = rows_of[side][begin:end].transpose(0, 1)
            table[rows[i], : blocks[i]] = own
        query_lens = [len(q) for q in self.queries]
        starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
        seq_lens = np.array([a + b for a, b in self.lengths], np.int32)
        pads = torch.full((self.pad_tokens, self.group * self.kv_heads, self.head_size), float("nan"), dtype=self.dtype)
        q = torch.cat([*self.queries, pads])
        batch = DeviceBatch.from_host(
            starts,
            seq_lens,
            table,
            self.block_size,
            self.window,
            rows=rows.astype(np.int32),
            num_tokens=len(q),
            device=device,
        )
        return q.to(device), pages.view(kept).to(device)[:, 1], batch

    def dense(self) -> torch.Tensor:
        """The result in float64, [n, heads, d]."""
        parts = [self._dense_of(i) for i in range(len(self.lengths))]
        heads = self.group * self.kv_heads
        return torch.cat([*parts, torch.zeros(self.pad_tokens, heads, self.head_size, dtype=torch.float64)])

    def _dense_of(self, i: int) -> torch.Tensor:
        computed, new = self.lengths[i]
        if not new:
            return torch.zeros(self.queries[i].shape, dtype=torch.float64)
        keys, values = (self._held(i, side).repeat_interleave(self.group, 1) for side in (0, 1))
        scores = torch.einsum("qhd,khd->hqk", self.queries[i].double(), keys) * self.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        back = torch.arange(computed, computed + new)[:, None] - torch.arange(computed + new)
        unseen = (back < 0) | (back >= (self.window or computed + new))
        scores = scores.masked_fill(unseen, float("-inf"))
        if self.sink is not None:
            scores = torch.cat([scores, self.sink.double()[:, None, None].expand(-1, new, 1)], -1)
        weights = scores.softmax(-1)[..., : computed + new]
        return torch.einsum("hqk,khd->qhd", weights, values)
