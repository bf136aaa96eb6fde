"""What attention must know of a step on a device: the twin of `PagedBatch` whose lengths the host need not know."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class DeviceBatch:
    """A step's r requests, each with its queries side by side in the flat batch, as layers of one KV group see them.

    Its tensors are persistent and keep their addresses; they and the numbers beside them are all that a launch is made of. No
    length of a step is among the numbers, so that a graph which is captured once serves all lengths.

    Padding is of two kinds, and both get zeros as a result. A padding request has `seq_lens` 0 and a row nobody uses; padding
    tokens are those from `query_start_loc[r]` on, up to `num_tokens`.
    """

    block_size: int
    rows: torch.Tensor
    """[r], int32: the request's row in `block_table`."""
    query_start_loc: torch.Tensor
    """[r + 1], int32: request i has the tokens query_start_loc[i] to query_start_loc[i + 1] of the batch."""
    seq_lens: torch.Tensor
    """[r], int32: tokens with keys in the cache, this step's included; 0: a padding request."""
    block_table: torch.Tensor
    """[max_rows, max_blocks], int32: the whole table, a row's blocks in order; entries past its last block or before its first
    query's window are any valid block, whose content is never seen."""
    window: int | None
    """Keys that a query sees, itself included: the one at position i those of (i - window, i]. None: all before it."""
    max_query_len: int
    """No request has more queries. It selects the launch and nothing else, so that any bound does."""
    num_tokens: int
    """Queries of the flat batch, padding included."""
    shared: torch.Tensor | None = None
    """[1], int32, of requests with one query each and without a window: so many first tokens of all requests lie in the blocks of
    the first one, a multiple of `SHARED_STEP` and before each query's own token; 0: none. It changes what is launched and read,
    and not what the result is. None: requests have nothing to do with each other."""

    @property
    def num_requests(self) -> int:
        """Padding included."""
        return self.rows.shape[0]

    @staticmethod
    def from_host(
        query_start_loc: Int32,
        seq_lens: Int32,
        block_table: Int32,
        block_size: int,
        window: int | None = None,
        *,
        rows: Int32 | None = None,
        num_tokens: int | None = None,
        device: str | torch.device = "cpu",
    ) -> "DeviceBatch":
        """A batch that is used once, from arrays as `PagedBatch` has them.

        Args:
            query_start_loc: [r + 1].
            seq_lens: [r].
            block_table: [max_rows, max_blocks].
            block_size: Tokens a block.
            window: See the field.
            rows: [r]; None: request i has row i.
            num_tokens: With padding tokens; None: there are none.
            device: Where the tensors go.
        """

        def tensor(array: Int32) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, np.int32)).to(device)

        return DeviceBatch(
            block_size=block_size,
            rows=tensor(np.arange(len(seq_lens), dtype=np.int32) if rows is None else rows),
            query_start_loc=tensor(query_start_loc),
            seq_lens=tensor(seq_lens),
            block_table=tensor(block_table),
            window=window,
            max_query_len=int(np.diff(query_start_loc).max(initial=1)),
            num_tokens=int(query_start_loc[-1]) if num_tokens is None else num_tokens,
        )
