"""Never completes one of a list of token sequences: the last token is masked where the output ends in those before it."""

import numpy as np
import torch

from penstock.engine.core.plan import Bool, Int32, Int64
from penstock.engine.runner.device.runtime import Copies
from penstock.engine.runner.device.uploads import upload
from penstock.engine.runner.sampler.logits_rows import LogitsRows
from penstock.engine.runner.sampler.row_lists import RowLists
from penstock.engine.runner.sampler.stage import MASKED, Tokens, places
from penstock.engine.sampling import MAX_BAD_WORD_TOKENS, SamplingParams

_WIDTH = MAX_BAD_WORD_TOKENS - 1
_ANY = -1
_WORD = np.dtype([("prefix", np.int32, (_WIDTH,)), ("length", np.int32), ("last", np.int32)])
"""The tokens before the last one are at the end of `prefix`, `length` of them, after as many `_ANY` as there is room for."""


class BadWords:
    """Looks at the output alone, as vLLM does: a word that begins in the prompt may be completed."""

    def __init__(self, runtime: Copies, max_num_seqs: int, vocab_size: int) -> None:
        self._runtime, self._vocab_size = runtime, vocab_size
        self._words = RowLists(max_num_seqs, _WORD)

    def admit(self, row: int, token_ids: Int32, num_prompt_tokens: int, params: SamplingParams) -> bool:
        del token_ids, num_prompt_tokens
        # A word with a token that is never sampled is never completed.
        words = [word for word in params.bad_words if max(word) < self._vocab_size]
        table = np.full(len(words), _ANY, _WORD)
        for entry, word in zip(table, words, strict=True):
            entry["prefix"][_WIDTH + 1 - len(word) :] = word[:-1]
            entry["length"], entry["last"] = len(word) - 1, word[-1]
        return self._words.put(row, table)

    def wants(self, rows: LogitsRows) -> Bool:
        return self._words.has(rows.request_rows)

    def apply(self, logits: torch.Tensor, at: Int64, rows: LogitsRows, positions: torch.Tensor, tokens: Tokens) -> None:
        owners, words = self._words.of(rows.request_rows)
        begins = rows.request_rows[owners].astype(np.int64) * tokens.device.shape[1]
        needed = rows.num_prompt_tokens[owners] + words["length"]
        there = at[owners], begins, needed, words["prefix"], places(at[owners], words["last"], logits)
        index, begins, needed, prefixes, where = upload(self._runtime, *there)
        position = positions.index_select(0, index)
        # Columns before the output are not part of any match, those before the request included.
        columns = position[:, None] + torch.arange(-_WIDTH, 0, device=position.device)
        recent = tokens.device.view(-1).index_select(0, (begins[:, None] + columns.clamp(min=0)).view(-1))
        ends = ((recent.view(prefixes.shape) == prefixes) | (prefixes == _ANY)).all(1) & (position >= needed)
        # Several words may end in one token.
        logits.view(-1).scatter_reduce_(0, where, torch.where(ends, MASKED, -MASKED), "amin")
