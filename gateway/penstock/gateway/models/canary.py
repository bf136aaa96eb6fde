"""Which side of a canary a request is on.

A conversation stays on one side, since the other has none of its KV cache. The side depends on the start of the conversation (the
client's `prompt_cache_key`, or everything up to the first words of the user), hashed with the tenant. Other requests are drawn by
their ids. A growing weight moves more conversations over and none back.
"""

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, cast

from penstock.api.fleet import Model

MAX_CHARACTERS = 4_096
"""Most characters that count of each text of a conversation's start."""


def side(main: Model, canaries: Sequence[Model], key: bytes, serves: Callable[[Model], bool]) -> Model:
    """The model that takes a request for `main`: a canary that serves, with its weight, else `main`.

    Args:
        main: The model that was asked for.
        canaries: Those that share its traffic; where their weights sum to more than 100, the first ones get theirs.
        key: Equal for requests that shall be on one side.
        serves: Whether a model has a replica that could take it.
    """
    if not canaries:
        return main
    drawn = int.from_bytes(blake2b(main.id.encode() + b"\0" + key, digest_size=8).digest(), "big") / 2**64 * 100
    reach = 0.0
    for model in canaries:
        reach += model.canary.weight if model.canary else 0.0
        if drawn < reach:
            return model if serves(model) else main
    return main


def conversation_key(fields: Mapping[str, Any], tenant: str, request_id: str) -> bytes:
    """What requests of one conversation share.

    Args:
        fields: The request's body.
        tenant: Whose it is: equal words of two tenants are two conversations.
        request_id: Stands in where the body opens no conversation.
    """
    mine = fields.get("prompt_cache_key")
    opening = mine if isinstance(mine, str) and mine else _opening(fields)
    words = opening if opening is not None else f"\0{request_id}"
    return f"{tenant}\0{words}".encode(errors="surrogatepass")


def _opening(fields: Mapping[str, Any]) -> str | None:
    """The texts up to the first of the user; None where there is none (`/v1/completions`, what the engine will refuse)."""
    turns = fields.get("messages", fields.get("input"))
    head = fields.get("instructions")
    texts = [head[:MAX_CHARACTERS]] if isinstance(head, str) else []
    if isinstance(turns, str):
        return "\0".join([*texts, turns[:MAX_CHARACTERS]])
    if not isinstance(turns, list):
        return None
    for turn in cast("list[object]", turns):
        if not isinstance(turn, dict):
            return None
        turn = cast("dict[str, object]", turn)
        texts.append(_text(turn.get("content")))
        if turn.get("role") == "user":
            return "\0".join(texts)
    return None


def _text(content: object) -> str:
    if isinstance(content, list):
        parts = [cast("dict[str, object]", part) for part in cast("list[object]", content) if isinstance(part, dict)]
        return "\n".join(text[:MAX_CHARACTERS] for part in parts if isinstance(text := part.get("text"), str))
    return content[:MAX_CHARACTERS] if isinstance(content, str) else ""
