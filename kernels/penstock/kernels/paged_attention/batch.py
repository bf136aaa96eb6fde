"""What attention must know of a step: which tokens belong to which request, and where their keys and values lie."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

KV_TILE = 128
"""Keys that a query meets at a time, in the order of their positions. Part of the result's bits: the same for every batch."""


@dataclass(frozen=True)
class DecodeTile:
    """One tile of all requests with one query, the longest first, so that those that reach the tile, and whose window has not
    left it behind, stand side by side."""

    rows: slice
    block_ids: torch.Tensor
    """[rows · blocks a tile], int64."""
    unseen: torch.Tensor | None
    """[rows, keys], bool: True past the request's last token and before its window; None where no such key is in the tile."""


@dataclass(frozen=True)
class PrefillTile:
    """One tile of a request with several queries, in the order of their positions, so that those that see any of its keys stand
    side by side."""

    queries: slice
    """Counted in the chunk."""
    block_ids: torch.Tensor
    """[blocks a tile], int64."""
    unseen: torch.Tensor | None
    """[queries, keys], bool: True where the key lies after the query or before its window; None where none does."""
    foreign: torch.Tensor | None
    """[keys], bool: True where no query of the chunk sees the key, so that anything may lie there; None where there is none."""


@dataclass(frozen=True)
class Prefill:
    """A request's chunk: its first token in the step and how many there are."""

    start: int
    length: int
    tiles: list[PrefillTile]


@dataclass(frozen=True)
class PagedBatch:
    """A step's requests, each with its queries side by side in the flat batch, as layers of one KV group see them."""

    block_size: int
    query_start_loc: npt.NDArray[np.int32]
    """[r + 1]: request i has the tokens query_start_loc[i] to query_start_loc[i + 1] of the batch, and may have none."""
    seq_lens: npt.NDArray[np.int32]
    """[r]: tokens with keys in the cache, this step's included."""
    block_table: npt.NDArray[np.int32]
    """[r, b], whose rows may lie apart: the request's blocks in order; entries past its last block or before its first query's
    window are any valid block, whose content is never seen."""
    window: int | None = None
    """Keys that a query sees, itself included: the one at position i those of (i - window, i]. None: all before it."""
    ends: npt.NDArray[np.int32] | None = None
    """[n]: by query, the position after the last key that it sees, at least its own and never less than that of the query before
    it; all keys before it must be in the cache. The window's beginning stays. None: each query sees up to itself."""

    @cached_property
    def tile_blocks(self) -> int:
        """Blocks a tile."""
        return max(1, KV_TILE // self.block_size)

    @cached_property
    def decode_tokens(self) -> torch.Tensor:
        """[d], int64: tokens of the requests with one query, the longest request first."""
        return torch.from_numpy(self.query_start_loc[self._decode_rows].astype(np.int64))

    @cached_property
    def decode_tiles(self) -> list[DecodeTile]:
        """The tiles of the requests with one query."""
        rows, keys = self._decode_rows, self.tile_blocks * self.block_size
        lens, table = self.seq_lens[rows], self._padded_table(rows)
        begins, longest = self._window_begins(lens - 1), int(lens.max(initial=0))
        tiles: list[DecodeTile] = []
        for start in range(int(begins.min(initial=longest)) // keys * keys, longest, keys):
            seen = slice(int(np.count_nonzero(begins >= start + keys)), int(np.count_nonzero(lens > start)))
            if seen.start >= seen.stop:
                continue
            at = np.arange(start, start + keys)
            unseen = (at >= lens[seen, None]) | (at < begins[seen, None])
            tiles.append(DecodeTile(seen, self._ids(table[seen], start), _mask(unseen)))
        return tiles

    @cached_property
    def prefills(self) -> list[Prefill]:
        """The requests with several queries."""
        query_lens = np.diff(self.query_start_loc)
        return [
            Prefill(int(self.query_start_loc[row]), int(query_lens[row]), self._prefill_tiles(int(row), int(query_lens[row])))
            for row in np.flatnonzero(query_lens > 1)
        ]

    def _prefill_tiles(self, row: int, length: int) -> list[PrefillTile]:
        keys, seq_len = self.tile_blocks * self.block_size, int(self.seq_lens[row])
        positions, table = np.arange(seq_len - length, seq_len), self._padded_table(np.array([row]))
        begins, first = self._window_begins(positions), int(self.query_start_loc[row])
        ends = positions + 1 if self.ends is None else self.ends[first : first + length]
        tiles: list[PrefillTile] = []
        for start in range(int(begins[0]) // keys * keys, seq_len, keys):
            queries = slice(int(np.count_nonzero(ends <= start)), int(np.count_nonzero(begins < start + keys)))
            at = np.arange(start, start + keys)
            unseen = (at >= ends[queries, None]) | (at < begins[queries, None])
            foreign = (at >= seq_len) | (at < begins[0])
            tiles.append(PrefillTile(queries, self._ids(table, start), _mask(unseen), _mask(foreign)))
        return tiles

    def _window_begins(self, positions: npt.NDArray[np.signedinteger[Any]]) -> npt.NDArray[np.signedinteger[Any]]:
        """The first key that queries at these positions see."""
        return np.zeros_like(positions) if self.window is None else np.maximum(positions - self.window + 1, 0)

    @cached_property
    def _decode_rows(self) -> npt.NDArray[np.intp]:
        rows = np.flatnonzero(np.diff(self.query_start_loc) == 1)
        return rows[np.argsort(-self.seq_lens[rows], kind="stable")]

    def _padded_table(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        """The rows' blocks, filled up to whole tiles with block 0, whose keys are masked."""
        table = self.block_table[rows].astype(np.int64)
        return np.pad(table, ((0, 0), (0, -table.shape[1] % self.tile_blocks)))

    def _ids(self, table: npt.NDArray[np.int64], start: int) -> torch.Tensor:
        first = start // self.block_size
        return torch.from_numpy(table[:, first : first + self.tile_blocks].reshape(-1))


def _mask(masked: npt.NDArray[np.bool_]) -> torch.Tensor | None:
    return torch.from_numpy(masked) if masked.any() else None
