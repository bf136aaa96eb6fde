"""The guard against a model that repeats itself: a pattern of tokens, said again and again at the end of the output.

For each row and each length p, a run counts how many of the latest output tokens equal the token p places before them. A
pattern of p tokens stands there n times in a row when the run reaches p * (n - 1). One array operation a step serves all rows
that asked.
"""

from collections.abc import Sequence

import numpy as np

from penstock.engine.core.plan import Bool, Int32, Int64
from penstock.engine.sampling import MAX_REPETITION_PATTERN, SamplingParams

_NEVER = np.iinfo(np.int32).max
_LENGTHS = np.arange(1, MAX_REPETITION_PATTERN + 1, dtype=np.int32)


class RepetitionGuard:
    """Runs of every row; column p - 1 is that of length p.

    Args:
        max_num_seqs: Rows.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._asked: Bool = np.zeros(max_num_seqs, np.bool_)
        self._runs: Int32 = np.zeros((max_num_seqs, MAX_REPETITION_PATTERN), np.int32)
        self._needed: Int32 = np.zeros((max_num_seqs, MAX_REPETITION_PATTERN), np.int32)
        self._starts: Int32 = np.zeros(max_num_seqs, np.int32)

    def move_in(self, row: int, sampling: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """A request takes the row, with these tokens known; its output so far, if it resumes, counts."""
        asked = sampling.repetition_detection
        self._asked[row] = asked is not None
        if asked is None:
            return
        wanted = (asked.min_pattern_size <= _LENGTHS) & (asked.max_pattern_size >= _LENGTHS)
        self._needed[row] = np.where(wanted, _LENGTHS * (asked.min_count - 1), _NEVER)
        self._starts[row] = num_prompt_tokens
        output = np.array(token_ids[num_prompt_tokens:], np.int32)
        self._runs[row] = 0
        for length in range(1, min(MAX_REPETITION_PATTERN, len(output) - 1) + 1):
            differs = np.flatnonzero(output[length:] != output[:-length])
            self._runs[row, length - 1] = len(output) - length - (differs[-1] + 1 if len(differs) else 0)

    def guards(self, rows: Int64) -> bool:
        """Whether one of these rows has asked for it."""
        return bool(np.count_nonzero(self._asked[rows]))

    def trips(self, rows: Int64, positions: Int32, token_ids: Int32) -> Bool:
        """[m]: which rows have said a pattern as often as their requests allow.

        Args:
            rows: [m].
            positions: [m], where the rows' newest tokens stand.
            token_ids: [rows, max_model_len], all rows' tokens, the newest included.
        """
        tripped = np.zeros(len(rows), np.bool_)
        asked = self._asked[rows]
        if np.count_nonzero(asked):
            guarded, newest = rows[asked], positions[asked]
            back = newest[:, None] - _LENGTHS
            same = token_ids[guarded[:, None], np.maximum(back, 0)] == token_ids[guarded, newest][:, None]
            same &= back >= self._starts[guarded][:, None]
            self._runs[guarded] = np.where(same, self._runs[guarded] + 1, 0)
            tripped[asked] = (self._runs[guarded] >= self._needed[guarded]).any(axis=1)
        return tripped
