"""What attention must know of a step: which tokens belong to which request, and where their keys and values lie."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

KV_TILE = 128
"""Keys that a query meets at a time, in the order of their positions. Part of the result's bits: the same for every batch."""


@dataclass(frozen=True)
class DecodeTile:
    """One tile of all requests with one query, the longest first, so that those that reach the tile are a prefix."""

    num_rows: int
    block_ids: torch.Tensor
    """[num_rows · blocks a tile], int64."""
    beyond: torch.Tensor | None
    """[num_rows, keys], bool: True past the request's last token; None where no such key is in the tile."""


@dataclass(frozen=True)
class PrefillTile:
    """One tile of a request with several queries, in the order of their positions, so that those that reach it are a suffix."""

    first: int
    """The first query, counted in the chunk, that reaches the tile."""
    block_ids: torch.Tensor
    """[blocks a tile], int64."""
    future: torch.Tensor | None
    """[queries from `first`, keys], bool: True where the key lies after the query; None where none does."""
    beyond: torch.Tensor | None
    """[keys], bool: True past the request's last token; None where no such key is in the tile."""


@dataclass(frozen=True)
class Prefill:
    """A request's chunk: its first token in the step and how many there are."""

    start: int
    length: int
    tiles: list[PrefillTile]


@dataclass(frozen=True)
class PagedBatch:
    """A step's requests, each with its queries side by side in the flat batch."""

    block_size: int
    query_start_loc: npt.NDArray[np.int32]
    """[r + 1]: request i has the tokens query_start_loc[i] to query_start_loc[i + 1] of the batch."""
    seq_lens: npt.NDArray[np.int32]
    """[r]: tokens with keys in the cache, this step's included."""
    block_table: npt.NDArray[np.int32]
    """[r, b]: the request's blocks in order; entries past its last block are any valid block."""

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
        tiles: list[DecodeTile] = []
        for start in range(0, int(lens.max(initial=0)), keys):
            count = int(np.count_nonzero(lens > start))
            beyond = np.arange(start, start + keys) >= lens[:count, None]
            tiles.append(DecodeTile(count, self._ids(table[:count], start), _mask(beyond)))
        return tiles

    @cached_property
    def prefills(self) -> list[Prefill]:
        """The requests with several queries."""
        query_lens = np.diff(self.query_start_loc)
        return [
            Prefill(int(self.query_start_loc[row]), int(query_lens[row]), self._prefill_tiles(row, int(query_lens[row])))
            for row in np.flatnonzero(query_lens > 1)
        ]

    def _prefill_tiles(self, row: np.intp, length: int) -> list[PrefillTile]:
        keys, seq_len = self.tile_blocks * self.block_size, int(self.seq_lens[row])
        positions, table = np.arange(seq_len - length, seq_len), self._padded_table(np.array([row]))
        tiles: list[PrefillTile] = []
        for start in range(0, seq_len, keys):
            first = max(0, start - int(positions[0]))
            key_positions = np.arange(start, start + keys)
            future = key_positions > positions[first:, None]
            tiles.append(PrefillTile(first, self._ids(table, start), _mask(future), _mask(key_positions >= seq_len)))
        return tiles

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
