"""Makes tokens of prompt and output less likely (Keskar et al., "CTRL", 2019)."""

import numpy as np
import torch

from penstock.engine.core.plan import Bool, Int32
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.sampling import SamplingParams


def apply_repetition_penalty(logits: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """Divides positive logits of seen tokens and multiplies negative ones, so that a penalty above 1 lowers both.

    Args:
        logits: [k, vocab].
        seen: [k, vocab], bool.
        penalty: [k], above 0.

    Returns:
        [k, vocab].
    """
    factor = torch.where(seen, penalty[:, None], 1.0)
    return torch.where(logits > 0, logits / factor, logits * factor)


class RepetitionPenalty:
    """A byte a token of the vocabulary for each row that has ever had a penalty: memory is given when it is written."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._penalty = np.ones(max_num_seqs, np.float32)
        self._seen = np.zeros((max_num_seqs, vocab_size), np.bool_)

    def admit(self, row: int, token_ids: Int32, num_prompt_tokens: int, params: SamplingParams) -> bool:
        del num_prompt_tokens
        self._penalty[row] = params.repetition_penalty
        if params.repetition_penalty == 1.0:
            return False
        self._seen[row] = False
        self._seen[row, token_ids] = True
        return True

    def wants(self, rows: LogitsRows) -> Bool:
        return self._penalty[rows.request_rows] != 1.0

    def apply(self, logits: torch.Tensor, at: torch.Tensor, rows: LogitsRows) -> None:
        seen = torch.from_numpy(self._seen[rows.request_rows])
        penalty = torch.from_numpy(self._penalty[rows.request_rows])
        logits[at] = apply_repetition_penalty(logits[at], seen, penalty)

    def observe(self, rows: LogitsRows, token_ids: Int32) -> None:
        asked = self.wants(rows)
        self._seen[rows.request_rows[asked], token_ids[asked]] = True
