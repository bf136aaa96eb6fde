"""Prompts of exact lengths, made with the model's own tokenizer."""

from pathlib import Path
from typing import Final

import numpy as np
from tokenizers import Tokenizer

from penstock.client.server import Server, ServerError
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.errors import BundleError

_ROUNDS: Final = 10
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
Prompt = list[int] | str


class Prompts:
    """Random prompts over the ordinary tokens of a vocabulary: no special ones, and none that is only a part of a character.

    Args:
        tokenizer: The model's.
        as_text: Whether prompts are to be text, as chats need it, or token ids.
    """

    def __init__(self, tokenizer: Tokenizer, as_text: bool) -> None:
        self.tokenizer = tokenizer
        self.as_text = as_text
        special = set(tokenizer.get_added_tokens_decoder())
        ids = sorted(set(tokenizer.get_vocab(with_added_tokens=False).values()) - special)
        texts = tokenizer.decode_batch([[one] for one in ids])
        self._ordinary = np.array([one for one, text in zip(ids, texts, strict=True) if text and _REPLACEMENT not in text])

    def tokens(self, rng: np.random.Generator, count: int) -> list[int]:
        """`count` random token ids."""
        return rng.choice(self._ordinary, count).tolist()

    def prompt(self, tokens: list[int], rng: np.random.Generator) -> Prompt:
        """The tokens as a prompt. Text is cut or lengthened until it has as many tokens: its beginning stays the same wherever
        the tokens begin the same, the tokens themselves need not."""
        if not self.as_text:
            return tokens
        wanted = len(tokens)
        for _ in range(_ROUNDS):
            text = self.tokenizer.decode(tokens, skip_special_tokens=False)
            tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
            if len(tokens) == wanted:
                return text
            tokens = tokens[:wanted] + self.tokens(rng, max(0, wanted - len(tokens)))
        return self.tokenizer.decode(tokens, skip_special_tokens=False)  # off by a token or so; `usage` counts what it is


async def load_tokenizer(where: str | None, server: Server) -> Tokenizer:
    """The tokenizer of a folder, a tokenizer.json, or a model on Hugging Face; None: the one that a Penstock engine shows at
    `/prompt-bundle`. Raises `ServerError` where there is none.
    """
    tokenizer = await _shown_by(server) if where is None else _named(where)
    # Files saved from training may pad or cut.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


async def _shown_by(server: Server) -> Tokenizer:
    try:
        return Tokenizer.from_str(PromptBundle.from_json(await server.get("/prompt-bundle")).tokenizer)
    except (ServerError, BundleError) as error:
        if isinstance(error, ServerError) and error.kind == "connection":
            raise
        asked = "the server shows no tokenizer at /prompt-bundle; name the model's with --tokenizer FOLDER"
        raise ServerError("tokenizer", f"{asked} ({error})") from None


def _named(where: str) -> Tokenizer:
    path = Path(where)
    try:
        if path.exists():
            return Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path))
        return Tokenizer.from_pretrained(where)
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        raise ServerError("tokenizer", f"no tokenizer in {where}: {error}") from None
