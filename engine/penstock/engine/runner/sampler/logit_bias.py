"""Adds what a client chose to the logits of single tokens."""

import numpy as np
import torch

from penstock.engine.core.plan import Bool, Int32, Int64
from penstock.engine.runner.device.runtime import Copies
from penstock.engine.runner.device.uploads import upload
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.runner.sampler.row_lists import RowLists
from penstock.engine.runner.sampler.stage import Tokens, places
from penstock.engine.sampling import SamplingParams

_BIAS = np.dtype([("token", np.int32), ("bias", np.float32)])


class LogitBias:
    """A masked token stays masked."""

    def __init__(self, runtime: Copies, max_num_seqs: int, vocab_size: int) -> None:
        self._runtime, self._vocab_size = runtime, vocab_size
        self._biases = RowLists(max_num_seqs, _BIAS)

    def admit(self, row: int, token_ids: Int32, num_prompt_tokens: int, params: SamplingParams) -> bool:
        del token_ids, num_prompt_tokens
        biases = np.array(list(params.logit_bias), _BIAS)
        return self._biases.put(row, biases[biases["token"] < self._vocab_size])

    def wants(self, rows: LogitsRows) -> Bool:
        return self._biases.has(rows.request_rows)

    def apply(self, logits: torch.Tensor, at: Int64, rows: LogitsRows, positions: torch.Tensor, tokens: Tokens) -> None:
        del positions, tokens
        owners, biases = self._biases.of(rows.request_rows)
        where, bias = upload(self._runtime, places(at[owners], biases["token"], logits), biases["bias"])
        logits.view(-1).index_add_(0, where, bias)
