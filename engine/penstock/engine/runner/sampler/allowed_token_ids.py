"""Leaves nothing but the tokens of a list."""

import numpy as np
import torch

from penstock.engine.core.plan import Bool, Int32, Int64
from penstock.engine.runner.device.runtime import Copies
from penstock.engine.runner.device.uploads import upload
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.runner.sampler.row_lists import RowLists
from penstock.engine.runner.sampler.stage import MASKED, Tokens, ids, places, within
from penstock.engine.sampling import SamplingParams


class AllowedTokenIds:
    """A list of which the model knows no token leaves nothing at all."""

    def __init__(self, runtime: Copies, max_num_seqs: int, vocab_size: int) -> None:
        self._runtime, self._vocab_size = runtime, vocab_size
        self._restricted = np.zeros(max_num_seqs, np.bool_)
        self._allowed = RowLists(max_num_seqs, np.int32)

    def admit(self, row: int, token_ids: Int32, num_prompt_tokens: int, params: SamplingParams) -> bool:
        del token_ids, num_prompt_tokens
        self._restricted[row] = bool(params.allowed_token_ids)
        self._allowed.put(row, within(ids(params.allowed_token_ids), self._vocab_size))
        return bool(params.allowed_token_ids)

    def wants(self, rows: LogitsRows) -> Bool:
        return self._restricted[rows.request_rows]

    def apply(self, logits: torch.Tensor, at: Int64, rows: LogitsRows, positions: torch.Tensor, tokens: Tokens) -> None:
        del positions, tokens
        owners, allowed = self._allowed.of(rows.request_rows)
        there, where = upload(self._runtime, at, places(at[owners], allowed, logits))
        kept = logits.view(-1).index_select(0, where)
        logits.index_fill_(0, there, MASKED)
        logits.view(-1).index_copy_(0, where, kept)
