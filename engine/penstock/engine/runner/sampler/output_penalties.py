"""OpenAI's `frequency_penalty` and `presence_penalty`: of the output's tokens, by how often each is there, and once."""

import numpy as np
import torch

from penstock.engine.core.plan import Bool, Int32
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.sampling import SamplingParams


def apply_output_penalties(
    logits: torch.Tensor, counts: torch.Tensor, frequency: torch.Tensor, presence: torch.Tensor
) -> torch.Tensor:
    """Subtracts count · frequency + presence.

    Args:
        logits: [n], of tokens in the output.
        counts: [n], int32: how often each is there.
        frequency: [n].
        presence: [n].

    Returns:
        [n].
    """
    return logits - counts * frequency - presence


class OutputPenalties:
    """Four bytes a token of the vocabulary for each row that has ever had a penalty: memory is given when it is written."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._frequency = np.zeros(max_num_seqs, np.float32)
        self._presence = np.zeros(max_num_seqs, np.float32)
        self._counts = np.zeros((max_num_seqs, vocab_size), np.int32)

    def admit(self, row: int, token_ids: Int32, num_prompt_tokens: int, params: SamplingParams) -> bool:
        self._frequency[row], self._presence[row] = params.frequency_penalty, params.presence_penalty
        if not (params.frequency_penalty or params.presence_penalty):
            return False
        self._counts[row] = np.bincount(token_ids[num_prompt_tokens:], minlength=self._vocab_size)
        return True

    def wants(self, rows: LogitsRows) -> Bool:
        return (self._frequency[rows.request_rows] != 0) | (self._presence[rows.request_rows] != 0)

    def apply(self, logits: torch.Tensor, at: torch.Tensor, rows: LogitsRows) -> None:
        owners, tokens = rows.tokens(rows.num_prompt_tokens)
        of = rows.request_rows[owners]
        counts, frequency = torch.from_numpy(self._counts[of, tokens]), torch.from_numpy(self._frequency[of])
        penalised = apply_output_penalties(logits[at[owners], tokens], counts, frequency, torch.from_numpy(self._presence[of]))
        # A token that is there several times gets the same value as often.
        logits[at[owners], tokens] = penalised

    def observe(self, rows: LogitsRows, token_ids: Int32) -> None:
        asked = self.wants(rows)
        np.add.at(self._counts, (rows.request_rows[asked], token_ids[asked]), 1)
