"""Keeps an output from ending before it has its least number of tokens."""

import numpy as np
import torch

from penstock.engine.core.plan import Bool, Int32, Int64
from penstock.engine.runner.device.runtime import Copies
from penstock.engine.runner.device.uploads import upload
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.runner.sampler.row_lists import RowLists
from penstock.engine.runner.sampler.stage import MASKED, Tokens, ids, places, within
from penstock.engine.sampling import SamplingParams


class MinTokens:
    """Masks the tokens that end the output; once there are enough, a row costs nothing."""

    def __init__(self, runtime: Copies, max_num_seqs: int, vocab_size: int) -> None:
        self._runtime, self._vocab_size = runtime, vocab_size
        self._min_tokens = np.zeros(max_num_seqs, np.int32)
        self._stops = RowLists(max_num_seqs, np.int32)

    def admit(self, row: int, token_ids: Int32, num_prompt_tokens: int, params: SamplingParams) -> bool:
        del token_ids, num_prompt_tokens
        stops = params.stop_token_ids if params.min_tokens else ()
        self._min_tokens[row] = params.min_tokens
        return self._stops.put(row, within(ids(stops), self._vocab_size))

    def wants(self, rows: LogitsRows) -> Bool:
        return (rows.num_output_tokens < self._min_tokens[rows.request_rows]) & self._stops.has(rows.request_rows)

    def apply(self, logits: torch.Tensor, at: Int64, rows: LogitsRows, positions: torch.Tensor, tokens: Tokens) -> None:
        del tokens
        owners, stops = self._stops.of(rows.request_rows)
        enough = (rows.num_prompt_tokens + self._min_tokens[rows.request_rows])[owners]
        index, enough, where = upload(self._runtime, at[owners], enough, places(at[owners], stops, logits))
        limits = torch.where(positions.index_select(0, index) < enough, MASKED, -MASKED)
        logits.view(-1).scatter_reduce_(0, where, limits, "amin")
