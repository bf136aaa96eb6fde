"""Tags as a Lark grammar."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.engine.grammar import Tags

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_FREE = r"/(.|\n)*/"


def lark_of(tags: Tags, tokenizer: "LLTokenizer", options: Mapping[str, Any]) -> str:
    """The grammar of tags.

    Args:
        tags: What comes.
        tokenizer: Knows the model's special tokens.
        options: For their schemas.
    """
    choice = " | ".join(f"tag_{at}" for at in range(len(tags.tags)))
    rules = [f"tag: {choice}"]
    if tags.free:
        rules += ["start: tag* text", f"text: {_FREE}"]
    else:
        more = f"({_literal(tags.separator, tokenizer)} tag)*" if tags.several else ""
        calls = f"{_literal(tags.begin, tokenizer)} tag {more} {_literal(tags.end, tokenizer)}"
        rules.append(" | ".join([f"start: {calls}", *(f"answer_{at}" for at in range(len(tags.answer)))]))
        rules += [f"answer_{at}: {_json(schema, options)}" for at, schema in enumerate(tags.answer)]
    for at, tag in enumerate(tags.tags):
        head, begin = "", tag.begin
        if tags.free:
            head, begin = f"head_{at}", tag.begin[len(tag.trigger) :]
            rules.append(_head(head, tag.trigger, tokenizer))
        rules.append(f"tag_{at}: {head} {_literal(begin, tokenizer)} json_{at} {_literal(tag.end, tokenizer)}")
        rules.append(f"json_{at}: {_json(tag.schema, options)}")
    return "\n".join(rules)


def with_options(schema: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with options for its enforcement. Options in the schema itself win."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    own = schema.get("x-guidance", {})
    if not isinstance(own, dict):
        raise ValueError("x-guidance must be an object")
    return {**schema, "x-guidance": {**options, **own}}


def _json(schema: Any, options: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(with_options(schema, options))}"


def _head(name: str, trigger: str, tokenizer: "LLTokenizer") -> str:
    """Text up to a trigger: a special token, or the first place where these characters stand."""
    ids = tokenizer.tokenize_str(trigger, parse_special=True)
    if len(ids) == 1 and tokenizer.is_special_token(ids[0]):
        return f"{name}: text <[{ids[0]}]>"
    return f"{name}[lazy]: {_FREE} {_quoted(trigger)}"


def _literal(text: str, tokenizer: "LLTokenizer") -> str:
    """The text as terms, special tokens by their numbers."""
    terms: list[str] = []
    plain: list[int] = []
    for token in tokenizer.tokenize_str(text, parse_special=True):
        if not tokenizer.is_special_token(token):
            plain.append(token)
            continue
        if plain:
            terms.append(_quoted(tokenizer.decode_str(plain)))
        plain = []
        terms.append(f"<[{token}]>")
    return " ".join([*terms, _quoted(tokenizer.decode_str(plain))] if plain else terms)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
