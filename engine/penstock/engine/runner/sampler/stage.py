"""A change to the logits that requests ask for one by one, and what it keeps of each."""

from typing import NamedTuple, Protocol

import numpy as np
import torch

from penstock.engine.core.plan import Bool, Int32, Int64
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.sampling import SamplingParams

MASKED = float("-inf")
"""The logit of a token that cannot be chosen."""


class Tokens(NamedTuple):
    """Where the tokens of all requests are."""

    device: torch.Tensor
    """[rows, max_model_len], int32, on the device: with all that have been sampled."""
    host: Int32
    """The same on the host, where the last ones may still be missing."""


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
        """[k]: whether `apply` is to be called for the row."""
        ...

    def apply(self, logits: torch.Tensor, at: Int64, rows: LogitsRows, positions: torch.Tensor, tokens: Tokens) -> None:
        """Changes some rows in place. A row depends on the tokens before its position, drafts included.

        Args:
            logits: [m, vocab], float32 and contiguous.
            at: [k]: the rows.
            rows: What those k stand for, as the host knows it.
            positions: [m], int32, on the device: of the token that each row chooses.
            tokens: Of all requests.
        """
        ...


def places(rows: Int64, token_ids: Int32, logits: torch.Tensor) -> Int64:
    """Where tokens [n] of rows [n] are in the flat logits."""
    return rows * logits.shape[1] + token_ids


def within(token_ids: Int32, vocab_size: int) -> Int32:
    """Of tokens that a client names those that the model has logits for; the tokenizer may know more of them."""
    return token_ids[token_ids < vocab_size]


def ids(token_ids: tuple[int, ...]) -> Int32:
    """As an array, [n]."""
    return np.array(token_ids, np.int32)
