"""Leaves nothing but the tokens of a list."""

import numpy as np
import torch

from penstock.engine.core.plan import Bool, Int32
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.runner.sampler.stage import MASKED, ids, within
from penstock.engine.sampling import SamplingParams


class AllowedTokenIds:
    """A byte a token of the vocabulary for each row that has ever had a list: the system gives memory when it is written."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._restricted = np.zeros(max_num_seqs, np.bool_)
        self._allowed = np.zeros((max_num_seqs, vocab_size), np.bool_)

    def admit(self, row: int, token_ids: Int32, num_prompt_tokens: int, params: SamplingParams) -> bool:
        del token_ids, num_prompt_tokens
        self._restricted[row] = bool(params.allowed_token_ids)
        if params.allowed_token_ids:
            self._allowed[row] = False
            self._allowed[row, within(ids(params.allowed_token_ids), self._vocab_size)] = True
        return bool(params.allowed_token_ids)

    def wants(self, rows: LogitsRows) -> Bool:
        return self._restricted[rows.request_rows]

    def apply(self, logits: torch.Tensor, at: torch.Tensor, rows: LogitsRows) -> None:
        allowed = torch.from_numpy(self._allowed[rows.request_rows])
        logits[at] = logits[at].masked_fill(~allowed, MASKED)

    def observe(self, rows: LogitsRows, token_ids: Int32) -> None:
        """What was chosen changes nothing."""
