"""Never completes one of a list of token sequences: the last token is masked where the output ends in those before it."""

import numpy as np
import torch

from penstock.engine.core.plan import Bool, Int32
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.runner.sampler.row_lists import RowLists
from penstock.engine.runner.sampler.stage import MASKED
from penstock.engine.sampling import MAX_BAD_WORD_TOKENS, SamplingParams

_WIDTH = MAX_BAD_WORD_TOKENS - 1
_WORD = np.dtype([("prefix", np.int32, (_WIDTH,)), ("length", np.int32), ("last", np.int32)])
"""The tokens before the last one are at the end of `prefix`, `length` of them."""


class BadWords:
    """Looks at the output alone, as vLLM does: a word that begins in the prompt may be completed."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._words = RowLists(max_num_seqs, _WORD)

    def admit(self, row: int, token_ids: Int32, num_prompt_tokens: int, params: SamplingParams) -> bool:
        del token_ids, num_prompt_tokens
        # A word with a token that is never sampled is never completed.
        words = [word for word in params.bad_words if max(word) < self._vocab_size]
        table = np.zeros(len(words), _WORD)
        for entry, word in zip(table, words, strict=True):
            entry["prefix"][_WIDTH + 1 - len(word) :] = word[:-1]
            entry["length"], entry["last"] = len(word) - 1, word[-1]
        return self._words.put(row, table)

    def wants(self, rows: LogitsRows) -> Bool:
        return self._words.has(rows.request_rows)

    def apply(self, logits: torch.Tensor, at: torch.Tensor, rows: LogitsRows) -> None:
        owners, words = self._words.of(rows.request_rows)
        columns = rows.positions[owners, None] + np.arange(-_WIDTH, 0)
        # Columns before the output are not part of any match, those before the request included.
        recent = rows.token_ids[rows.request_rows[owners, None], columns.clip(0)]
        before = np.arange(_WIDTH) < _WIDTH - words["length"][:, None]
        ends = ((recent == words["prefix"]) | before).all(1) & (words["length"] <= rows.num_output_tokens[owners])
        logits[at[owners[ends]], words["last"][ends]] = MASKED

    def observe(self, rows: LogitsRows, token_ids: Int32) -> None:
        """The row table has the tokens."""
