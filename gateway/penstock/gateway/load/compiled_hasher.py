"""Block hashes, and what is remembered of texts, in compiled form."""

import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from penstock.gateway.load.merges import merges_of
from penstock.gateway.picker.compiled import Compiled, Encode, TextHasher
from penstock.prompt import cuts
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.hashing import BlockHasher, ExtraKeys, every_key, first_keys
from penstock.prompt.memo import MAX_BYTES, HashedPrompt, PrefixMemo
from penstock.prompt.processor import CHANGES_CHATS, CHAT_PATH, PARAMS, PromptProcessor, TextPrompt

OF_OTHERS: Final = 4
"""Of what may be remembered, a fourth is for prompts that are not the package's: those with images, and in token ids."""
KEY_BYTES: Final = 16
"""Of the key by which the package names pieces of texts."""


class CompiledHasher(BlockHasher):
    """The hashes of a bundle's blocks. Blocks with images are Python's, which are few."""

    def __init__(self, bundle: PromptBundle, compiled: Compiled) -> None:
        super().__init__(bundle.block_size, bundle.hash_seed)
        self._compiled = compiled

    def chain(self, parent: bytes | None, tokens: Sequence[int], extra: ExtraKeys, start: int) -> list[bytes]:
        """See `BlockHasher.chain`. Other threads run meanwhile."""
        if extra.items:
            return super().chain(parent, tokens, extra, start)
        if len(tokens) < self.block_size:
            return []
        first = first_keys(extra) if parent is None else b""
        return self._compiled.chain(parent or self.root, array("I", tokens), self.block_size, every_key(extra), first)


class UsualChats(NamedTuple):
    """What hashes the usual chats of all clients together, by the package; see `TextHasher.chat`."""

    texts: TextHasher
    skeleton: Callable[[Sequence[tuple[str, bool]]], Sequence[str | tuple[int, bool]] | None]
    longest: int
    encode: Encode
    encode_some: tuple[Encode, int]
    """The same for a chat of which the tokenizer may read no more than so much."""
    every: bytes
    first: bytes


class CompiledMemo(PrefixMemo):
    """A memo that goes from a usual chat or a text to its hashes in one call, asks the tokenizer only for words that it neither
    remembers nor can read by the merges, and makes no list of the tokens. What it knows of such texts is the package's."""

    def __init__(self, processor: PromptProcessor, compiled: Compiled, max_bytes: int = MAX_BYTES) -> None:
        hasher, tokenizer = CompiledHasher(processor.bundle, compiled), processor.bundle.tokenizer
        super().__init__(processor, max_bytes // OF_OTHERS, hasher)
        of_texts, key, apart = max_bytes - max_bytes // OF_OTHERS, os.urandom(KEY_BYTES), self._cutter.apart
        self._texts: TextHasher | None = None
        if self._cutter.by_words:
            self._texts = compiled.TextHasher(
                hasher.block_size, hasher.root, apart, merges_of(tokenizer), key, cuts.MIN_PIECE, of_texts
            )

    def hashed(self, path: str, body: Mapping[str, Any], extra: ExtraKeys, most: int | None = None) -> list[HashedPrompt]:
        """As of any memo; of a usual chat in one call of the package."""
        if path == CHAT_PATH and self._texts is not None and CHANGES_CHATS.isdisjoint(body):
            processor, encode = self.processor, self._encoder(path, most)
            every, first = every_key(extra), first_keys(extra)
            messages, longest = body.get(PARAMS[path]), processor.most_characters
            found = self._texts.chat(messages, processor.skeleton, longest, encode, most, every, first)
            if found is not None:
                return [HashedPrompt(*found)]
        return super().hashed(path, body, extra, most)

    def usual_chats(self, most: int) -> UsualChats | None:
        """What hashes usual chats whose hashes nothing forks. None: they are not for the package. `most`: see
        `UsualChats.encode_some`."""
        if self._texts is None:
            return None
        processor, extra = self.processor, ExtraKeys()
        encode, some = self._encoder(CHAT_PATH, None), self._encoder(CHAT_PATH, most)
        keys = every_key(extra), first_keys(extra)
        return UsualChats(self._texts, processor.skeleton, processor.most_characters, encode, (some, most), *keys)

    def _encoder(self, path: str, most: int | None) -> Encode:
        return partial(self._encode, alone=False, param=PARAMS[path], most=most)

    def _text(self, prompt: TextPrompt, extra: ExtraKeys, most: int | None) -> HashedPrompt:
        text, special, param = prompt
        wrap = self._wrap if special else ([], [])
        if self._texts is None or wrap is None:
            return super()._text(prompt, extra, most)
        self.processor.check_length(text, param)
        encode = partial(self._encode, alone=False, param=param, most=most)
        try:
            return HashedPrompt(*self._texts.text(text, encode, most, every_key(extra), first_keys(extra), *wrap))
        except UnicodeEncodeError:
            return super()._text(prompt, extra, most)  # which refuses it by name
