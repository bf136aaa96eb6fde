"""A request's prompts as the picker uses them: counted and hashed exactly where the tokenizer is known, else by their bytes."""

from array import array
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import orjson

from penstock.gateway.load.traits import FOREIGN_SEED
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.compiled import Compiled
from penstock.gateway.picker.request import HashSpace, Prompt
from penstock.prompt.bundle import PromptBundle
from penstock.prompt.errors import PromptError
from penstock.prompt.hashing import BlockHasher, ExtraKeys
from penstock.prompt.memo import PrefixMemo

BYTES_PER_TOKEN: Final = 4
BYTES_BLOCK: Final = 16
DATA_URL: Final = b'"data:'
"""What a file in a body begins with."""
_BYTES: Final = BlockHasher(BYTES_BLOCK, "bytes")
_PROMPT_FIELDS: Final = ("instructions", "tools", "messages", "input", "prompt")
"""What of a body makes the prompt, in the order in which templates write it."""


class TokenizedPrompts(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of one request."""

    prompts: tuple[Prompt, ...]
    block_size: int = 16
    comparable: frozenset[ReplicaKey] = frozenset()
    """The replicas in whose hash space the block hashes are."""
    elsewhere: tuple[HashSpace, ...] = ()
    """The same prompts for replicas that hash otherwise."""
    unknown: str | None = None
    """Why `prompts` is a guess; None where it is exact."""


def space_of(bundle: PromptBundle) -> bytes:
    """What decides on tokens and hashes: bundles that agree in it are of one hash space, whatever names they serve."""
    return msgspec.msgpack.encode(
        (
            bundle.tokenizer,
            bundle.chat_template,
            sorted(bundle.special_tokens.items()),
            bundle.block_size,
            bundle.hash_seed,
            bundle.images,
        )
    )


def guessed_tokens(body: bytes, compiled: Compiled | None = None) -> int:
    """About how many tokens the prompt of a body has: one for each four bytes of text. `compiled`: what counts those; None:
    Python."""
    text = text_bytes(body) if compiled is None else compiled.text_bytes(body, DATA_URL)
    return text // BYTES_PER_TOKEN + 1


def text_bytes(body: bytes) -> int:
    """The bytes of a body that may be text. Files in `data:` URLs, which have no spaces, are none: an image of megabytes is some
    hundred tokens."""
    text, at = len(body), 0
    while (start := body.find(DATA_URL, at)) >= 0 and (at := body.find(b'"', start + len(DATA_URL))) >= 0:
        text -= at - start if body.find(b" ", start, at) < 0 else 0
    return text


def extra_keys(body: Mapping[str, Any], tenant: str, adapter: str | None) -> ExtraKeys:
    """What forks the hashes of a request besides its tokens."""
    salt = body.get("cache_salt")
    return ExtraKeys(lora=adapter, cache_salt=salt if isinstance(salt, str) else None, tenant=tenant)


def exact(memo: PrefixMemo, path: str, body: Mapping[str, Any], extra: ExtraKeys, most: int | None = None) -> tuple[Prompt, ...]:
    """The prompts of a body by the tokenizer; raises `PromptError`, and with `most` what `PrefixMemo.hashed` does."""
    # Engines of others know no tenants: they cache for all alike.
    if memo.processor.bundle.hash_seed == FOREIGN_SEED:
        extra = msgspec.structs.replace(extra, tenant="")
    return tuple([Prompt(*prompt) for prompt in memo.hashed(path, body, extra, most)])


def by_bytes(body: Mapping[str, Any], extra: ExtraKeys) -> tuple[Prompt, ...]:
    """A guess: four bytes of the JSON that makes the prompt as a token. A conversation that grows keeps its first blocks.
    Raises `PromptError` for lists in lists that orjson reads and does not write."""
    extra = msgspec.structs.replace(extra, tenant="")
    try:
        parts = [orjson.dumps(body[name]).rstrip(b"]") for name in _PROMPT_FIELDS if body.get(name)]
    except orjson.JSONEncodeError as error:
        raise PromptError(f"it cannot be written as JSON: {error}", "") from None
    data = b"".join(parts)
    whole = len(data) // BYTES_PER_TOKEN
    words = array("I", data[: whole * BYTES_PER_TOKEN])
    return (Prompt(guessed_tokens(data), tuple(_BYTES.hash(words, extra))),)
