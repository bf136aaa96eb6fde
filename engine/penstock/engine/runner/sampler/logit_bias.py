"""Adds what a client chose to the logits of single tokens."""

import numpy as np
import torch

from penstock.engine.core.plan import Bool, Int32
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.runner.sampler.row_lists import RowLists
from penstock.engine.sampling import SamplingParams

_BIAS = np.dtype([("token", np.int32), ("bias", np.float32)])


class LogitBias:
    """A masked token stays masked."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._biases = RowLists(max_num_seqs, _BIAS)

    def admit(self, row: int, token_ids: Int32, num_prompt_tokens: int, params: SamplingParams) -> bool:
        del token_ids, num_prompt_tokens
        biases = np.array(list(params.logit_bias), _BIAS)
        return self._biases.put(row, biases[biases["token"] < self._vocab_size])

    def wants(self, rows: LogitsRows) -> Bool:
        return self._biases.has(rows.request_rows)

    def apply(self, logits: torch.Tensor, at: torch.Tensor, rows: LogitsRows) -> None:
        owners, biases = self._biases.of(rows.request_rows)
        logits[at[owners], biases["token"]] += torch.from_numpy(biases["bias"].copy())

    def observe(self, rows: LogitsRows, token_ids: Int32) -> None:
        """What was chosen changes nothing."""
