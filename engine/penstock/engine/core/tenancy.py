"""Who has which row, and what ends them: the scheduler's own columns beside the row table."""

import numpy as np
import numpy.typing as npt

from penstock.engine.core.plan import Bool, Int32
from penstock.engine.core.request import Request

Int64 = npt.NDArray[np.int64]

NOBODY = 0
_NO_TOKEN = -1


class Tenancy:
    """Columns by row.

    Args:
        max_num_seqs: Rows.
        max_model_len: Tokens of a request at most.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self.requests: list[Request | None] = [None] * max_num_seqs
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.tenancies: Int64 = np.full(max_num_seqs, NOBODY, np.int64)
        """[rows]: a number for each stay of a request in a row. A step in flight whose number is not the row's any more was
        planned for somebody who has left since."""
        self.indexes: Int64 = np.full(max_num_seqs, -1, np.int64)
        """[rows]: the requests' names."""
        self.num_known: Int32 = np.zeros(max_num_seqs, np.int32)
        """[rows]: tokens whose ids are known here; behind the row table's `num_tokens` by those being sampled."""
        self.limits: Int32 = np.zeros(max_num_seqs, np.int32)
        """[rows]: tokens at which the request ends."""
        self._stop_ids: Int32 = np.full((max_num_seqs, 4), _NO_TOKEN, np.int32)
        self._last_tenancy = NOBODY

    def move_in(self, request: Request) -> int:
        """Gives the request a free row."""
        row = self.free_rows.pop()
        self._last_tenancy += 1
        self.requests[row] = request
        self.tenancies[row] = self._last_tenancy
        self.indexes[row] = request.index
        self.num_known[row] = len(request.token_ids)
        self.limits[row] = min(request.num_prompt_tokens + request.sampling.max_tokens, self._max_model_len)
        stop_ids = request.sampling.stop_token_ids
        missing = len(stop_ids) - self._stop_ids.shape[1]
        if missing > 0:
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, missing)), constant_values=_NO_TOKEN)
        self._stop_ids[row] = _NO_TOKEN
        self._stop_ids[row, : len(stop_ids)] = stop_ids
        return row

    def move_out(self, row: int) -> None:
        """Frees the row."""
        self.requests[row] = None
        self.tenancies[row] = NOBODY
        self.indexes[row] = -1
        self.free_rows.append(row)

    def stops(self, rows: Int32, token_ids: Int32) -> Bool:
        """[m]: which of the tokens end their rows' requests."""
        return (self._stop_ids[rows] == token_ids[:, None]).any(axis=1)
