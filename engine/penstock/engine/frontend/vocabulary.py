"""Single tokens as bytes and text: a token may be a part of a character."""

import json
import re
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@lru_cache(maxsize=1)
def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


class Vocabulary:
    """Token ids → bytes, by the tokenizer's own decoder: byte-level, byte fallback or plain text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
        kinds = {part.get("type") for part in _parts(decoder)}
        self.tokenizer = tokenizer
        self._context_free = decoder.get("type") == "ByteLevel"
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._metaspace = "Metaspace" in kinds or any(
            part.get("type") == "Replace" and part.get("pattern") == {"String": "▁"} for part in _parts(decoder)
        )
        added = tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Tokens that have no text in answers."""
        self._known: dict[int, bytes] = {}
        self.whole_texts: dict[int, str] = {}
        """What `whole_text` has said so far; looked at for each token, where a call costs more than what it finds."""

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token stands for; none for an id that the tokenizer does not know."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._bytes_of(token_id)
        return known

    def text_of(self, token_id: int) -> str:
        """The token as text, with U+FFFD for bytes that are no character alone."""
        return self.bytes_of(token_id).decode(errors="replace")

    def whole_text(self, token_id: int) -> str:
        """What a token adds to a text that ends with a whole character, if it ends with one too and that depends on nothing else:
        so it is for nearly all tokens of byte-level tokenizers. Empty for others, and for special tokens."""
        text = self.whole_texts.get(token_id)
        if text is None:
            text = self.tokenizer.decode([token_id], skip_special_tokens=True) if self._context_free else ""
            text = self.whole_texts[token_id] = "" if REPLACEMENT in text else text
        return text

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            alphabet = _byte_level_alphabet()
            if all(character in alphabet for character in token):
                return bytes(alphabet[character] for character in token)
        if self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return (token.replace("▁", " ") if self._metaspace else token).encode()


def _parts(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """A decoder and, where it is a sequence, those in it."""
    return [decoder, *decoder.get("decoders", [])]
