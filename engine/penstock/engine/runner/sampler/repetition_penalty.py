"""Makes tokens of prompt and output less likely (Keskar et al., "CTRL", 2019)."""

import numpy as np
import torch

from penstock.engine.core.plan import Bool, Int32
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.sampling import SamplingParams


def apply_repetition_penalty(logits: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Divides positive logits and multiplies negative ones, so that a penalty above 1 lowers both.

    Args:
        logits: [n], of tokens that are there.
        penalty: [n], above 0.

    Returns:
        [n].
    """
    return torch.where(logits > 0, logits / penalty, logits * penalty)


class RepetitionPenalty:
    """The row table says which tokens are there."""

    def __init__(self, max_num_seqs: int) -> None:
        self._penalty = np.ones(max_num_seqs, np.float32)

    def admit(self, row: int, token_ids: Int32, num_prompt_tokens: int, params: SamplingParams) -> bool:
        del token_ids, num_prompt_tokens
        self._penalty[row] = params.repetition_penalty
        return params.repetition_penalty != 1.0

    def wants(self, rows: LogitsRows) -> Bool:
        return self._penalty[rows.request_rows] != 1.0

    def apply(self, logits: torch.Tensor, at: torch.Tensor, rows: LogitsRows) -> None:
        owners, tokens = rows.tokens(np.zeros_like(rows.positions))
        penalty = torch.from_numpy(self._penalty[rows.request_rows[owners]])
        # A token that is there several times gets the same value as often.
        logits[at[owners], tokens] = apply_repetition_penalty(logits[at[owners], tokens], penalty)

    def observe(self, rows: LogitsRows, token_ids: Int32) -> None:
        """The row table has the tokens."""
