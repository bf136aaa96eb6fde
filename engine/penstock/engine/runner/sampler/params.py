"""Sampling parameters of all rows as arrays, written at admission."""

from dataclasses import dataclass

import numpy as np
import torch

from penstock.engine.core.plan import Int32
from penstock.engine.sampling import SamplingParams

NO_LOGPROBS = -1


@dataclass(frozen=True)
class SamplingBatch:
    """Parameters of m logits rows, each array [m]; a request may have several rows."""

    greedy: torch.Tensor
    """bool."""
    temperature: torch.Tensor
    """float32; 1 where greedy."""
    top_k: torch.Tensor
    """int64; 0: all."""
    top_p: torch.Tensor
    """float64."""
    min_p: torch.Tensor
    """float32."""
    seed: torch.Tensor
    """int64."""
    position: torch.Tensor
    """int64: in the request, of the token that is sampled."""
    logprobs: torch.Tensor
    """int64; NO_LOGPROBS where none are asked for."""


class SamplingTable:
    """Parameters by row; a row's hold until its next admission."""

    def __init__(self, max_num_seqs: int) -> None:
        self._greedy = np.ones(max_num_seqs, np.bool_)
        self._temperature = np.ones(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._top_p = np.ones(max_num_seqs, np.float64)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._seed = np.zeros(max_num_seqs, np.int64)
        self._logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int64)
        self._particular: set[int] = set()
        self.prompt_logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int64)
        """[rows]: alternatives for each token of the prompt; NO_LOGPROBS where none are asked for."""

    def admit(self, row: int, params: SamplingParams) -> None:
        """Sets every parameter of a row."""
        self._greedy[row] = params.greedy
        if params.greedy and params.logprobs is None:
            self._particular.discard(row)
        else:
            self._particular.add(row)
        self._temperature[row] = 1.0 if params.greedy else params.temperature
        self._top_k[row] = max(params.top_k, 0)
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        # The low 64 bits, whatever whole number the client chose.
        self._seed[row] = np.uint64(params.seed & 0xFFFFFFFFFFFFFFFF).astype(np.int64)
        self._logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.prompt_logprobs[row] = NO_LOGPROBS if params.prompt_logprobs is None else params.prompt_logprobs

    def is_plain(self, request_rows: Int32) -> bool:
        """Whether nothing is asked for any of these rows, [m], but the likeliest token: its parameters need not be gathered."""
        return not self._particular or self._particular.isdisjoint(request_rows.tolist())

    def batch(self, request_rows: Int32, positions: Int32) -> SamplingBatch:
        """Parameters of logits rows.

        Args:
            request_rows: [m]: which request each belongs to.
            positions: [m]: of the token that each samples.
        """
        return SamplingBatch(
            greedy=torch.from_numpy(self._greedy[request_rows]),
            temperature=torch.from_numpy(self._temperature[request_rows]),
            top_k=torch.from_numpy(self._top_k[request_rows]),
            top_p=torch.from_numpy(self._top_p[request_rows]),
            min_p=torch.from_numpy(self._min_p[request_rows]),
            seed=torch.from_numpy(self._seed[request_rows]),
            position=torch.from_numpy(positions.astype(np.int64)),
            logprobs=torch.from_numpy(self._logprobs[request_rows]),
        )
