"""The repetition penalty (Keskar et al., "CTRL", 2019), then OpenAI's `frequency_penalty` and `presence_penalty`."""

import numpy as np
import torch

from penstock.engine.core.plan import Bool, Int32, Int64
from penstock.engine.runner.device.runtime import Copies
from penstock.engine.runner.device.uploads import upload
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.runner.sampler.stage import Tokens
from penstock.engine.sampling import SamplingParams
from penstock.kernels.sampling.ops import SamplingOps

_AT_ONCE = 64
"""Rows whose tokens are counted at a time: on a GPU a number for each token of the vocabulary."""
_NONE = np.array([1, 0, 0], np.float32)


class Penalties:
    """A row's tokens are counted anew for each of its choices, up to the position of that choice."""

    def __init__(self, runtime: Copies, ops: SamplingOps, max_num_seqs: int) -> None:
        self._runtime, self._ops = runtime, ops
        self._penalties = np.tile(_NONE, (max_num_seqs, 1))

    def admit(self, row: int, token_ids: Int32, num_prompt_tokens: int, params: SamplingParams) -> bool:
        del token_ids, num_prompt_tokens
        self._penalties[row] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        return bool((self._penalties[row] != _NONE).any())

    def wants(self, rows: LogitsRows) -> Bool:
        return (self._penalties[rows.request_rows] != _NONE).any(1)

    def apply(self, logits: torch.Tensor, at: Int64, rows: LogitsRows, positions: torch.Tensor, tokens: Tokens) -> None:
        for start in range(0, len(at), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            of, longest = rows.request_rows[part], int(rows.positions[part].max(initial=0))
            there = upload(self._runtime, at[part].astype(np.int32), of, rows.num_prompt_tokens[part], self._penalties[of])
            index, of_device, begins, penalties = there
            ends = positions.index_select(0, index)
            self._ops.penalise(logits, index, tokens.device, of_device, begins, ends, penalties, longest)
