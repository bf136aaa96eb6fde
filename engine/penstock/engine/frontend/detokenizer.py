"""Incremental detokenisation: complete characters alone, each token decoded once."""

from collections.abc import Mapping, Sequence

from tokenizers.decoders import DecodeStream

from penstock.engine.frontend.vocabulary import REPLACEMENT, Vocabulary

_PRIME_MIN, _PRIME_MAX = 4, 24
# A character has at most four bytes: so many tokens without text are bytes that will never be a character.
_MAX_PENDING = 64


class Detokenizer:
    """The text of one growing sequence. Special tokens have no text.

    Args:
        vocabulary: Shared by all sequences.
        prompt: The prompt's token ids, since the first token's text may depend on what stands before it.
        shown: Special tokens that have text all the same, with that text.
    """

    __slots__ = ("_pending", "_shown", "_special_ids", "_stream", "_tokenizer", "_vocabulary", "_whole_texts")

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int], shown: Mapping[int, str] | None = None) -> None:
        self._vocabulary = vocabulary
        self._whole_texts = vocabulary.whole_texts
        self._tokenizer = vocabulary.tokenizer
        self._special_ids = vocabulary.special_ids
        self._shown = shown or {}
        self._stream = DecodeStream(self._prime(prompt), skip_special_tokens=True)
        self._pending: list[int] = []

    def step(self, token_id: int) -> str:
        """The text that a token completes: empty in the middle of a character."""
        if not self._pending and (text := self._whole_texts.get(token_id) or self._vocabulary.whole_text(token_id)):
            return text
        if token_id in self._special_ids:  # not fed: the stream would decode a long run of them again at each step
            return self.flush() + self._shown[token_id] if token_id in self._shown else ""
        self._pending.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            # The library raises plain Exception where text that it has given out changes with a later token.
            if not str(error).startswith("Invalid prefix"):
                raise
            return self.flush()
        if text is not None:
            self._pending.clear()
            return text
        return self.flush() if len(self._pending) >= _MAX_PENDING else ""

    def shows(self, token_id: int) -> bool:
        """Whether this is a special token with text."""
        return token_id in self._shown

    def flush(self) -> str:
        """The text of a character that was never completed: U+FFFD, as in a decode of the whole."""
        if not self._pending:
            return ""
        text = self._tokenizer.decode(self._pending, skip_special_tokens=True)
        self._pending.clear()
        self._stream = DecodeStream(skip_special_tokens=True)
        return text

    def _prime(self, prompt: Sequence[int]) -> list[int]:
        """The shortest end of the prompt that is whole characters; a long one would be decoded for nothing."""
        end = [token for token in prompt[-_PRIME_MAX:] if token not in self._special_ids]
        for length in range(min(_PRIME_MIN, len(end)), len(end) + 1):
            tail = end[len(end) - length :]
            if REPLACEMENT not in self._tokenizer.decode(tail):
                return tail
        return []
