"""A change to the logits that requests ask for one by one, and what it keeps of each."""

from typing import Protocol

import numpy as np
import torch

from penstock.engine.core.plan import Bool, Int32
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.sampling import SamplingParams

MASKED = float("-inf")
"""The logit of a token that cannot be chosen."""


class LogitsStage(Protocol):
    """State by request row, written at admission; a row's outcome is a function of its own logits, parameters and tokens."""

    def admit(self, row: int, token_ids: Int32, num_prompt_tokens: int, params: SamplingParams) -> bool:
        """Takes in what a row's new request asks for, in place of the last one's.

        Args:
            row: The request's row.
            token_ids: [n]: all tokens known, the prompt and, after a preemption, output; each within the vocabulary.
            num_prompt_tokens: How many of them are the prompt's.
            params: What the request asks for.

        Returns:
            Whether that is anything.
        """
        ...

    def wants(self, rows: LogitsRows) -> Bool:
        """[m]: whether `apply` is to be called for the row."""
        ...

    def apply(self, logits: torch.Tensor, at: torch.Tensor, rows: LogitsRows) -> None:
        """Changes some rows in place.

        Args:
            logits: [m, vocab], float32.
            at: [k], int64: the rows.
            rows: What those k stand for.
        """
        ...

    def observe(self, rows: LogitsRows, token_ids: Int32) -> None:
        """Takes in what has been chosen, [m]; the tokens are in the row table as well."""
        ...


def within(token_ids: Int32, vocab_size: int) -> Int32:
    """Of tokens that a client names those that the model has logits for; the tokenizer may know more of them."""
    return token_ids[token_ids < vocab_size]


def ids(token_ids: tuple[int, ...]) -> Int32:
    """As an array, [n]."""
    return np.array(token_ids, np.int32)
