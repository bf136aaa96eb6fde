"""Tags as a structural tag of xgrammar."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from tokenizers import Tokenizer

from penstock.engine.core.grammar.libraries import MAX_SPACES, GrammarError
from penstock.engine.grammar import Tag, Tags

_Format = dict[str, Any]


def structural_tag(tags: Tags, tokenizer: Tokenizer, eos_token_ids: Collection[int]) -> str:
    """The structural tag of tags, as JSON.

    Args:
        tags: What comes.
        tokenizer: Knows the model's special tokens.
        eos_token_ids: xgrammar takes these at the end of an answer alone.

    Raises:
        GrammarError: Some triggers are special tokens and some are text, or a tag has an EOS token.
    """
    special = {token.content: at for at, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    for name, at in special.items():
        if at in eos_token_ids and any(name in tag.begin + tag.end for tag in tags.tags):
            raise GrammarError(f"xgrammar takes no tag with {name}, which ends the answer: it needs the backend guidance")
    format_ = _free(tags, special) if tags.free else _forced(tags, special)
    return json.dumps({"type": "structural_tag", "format": format_}, ensure_ascii=False)


def _forced(tags: Tags, special: Mapping[str, int]) -> _Format:
    one = _either(
        [_sequence([*_literal(tag.begin, special), _json(tag.schema), *_literal(tag.end, special)]) for tag in tags.tags]
    )
    more = [{"type": "star", "content": _sequence([*_literal(tags.separator, special), one])}] if tags.several else []
    calls = _sequence([*_literal(tags.begin, special), one, *more, *_literal(tags.end, special)])
    return _either([calls, *(_json(schema) for schema in tags.answer)])


def _free(tags: Tags, special: Mapping[str, int]) -> _Format:
    by_token = [tag for tag in tags.tags if tag.trigger in special]
    if by_token and len(by_token) < len(tags.tags):
        raise GrammarError(
            "xgrammar takes triggers that are special tokens or triggers that are text, not both: it needs the backend guidance"
        )
    triggers = list(dict.fromkeys(tag.trigger for tag in tags.tags))
    made = [_triggered(tag, special) for tag in tags.tags]
    if by_token:
        return {"type": "token_triggered_tags", "trigger_tokens": [special[trigger] for trigger in triggers], "tags": made}
    return {"type": "triggered_tags", "triggers": triggers, "tags": made}


def _triggered(tag: Tag, special: Mapping[str, int]) -> _Format:
    """A tag among free text, whose first part is what tells it from text."""
    first, *rest = _literal(tag.begin, special)
    *before, last = [*rest, _json(tag.schema), *_literal(tag.end, special)]
    ends = last["type"] == "token" or last["type"] == "const_string"
    content = _sequence(before if ends else [*before, last])
    end: Any = "" if not ends else last if last["type"] == "token" else last["value"]
    return {"type": "tag", "begin": first if first["type"] == "token" else first["value"], "content": content, "end": end}


def _literal(text: str, special: Mapping[str, int]) -> list[_Format]:
    """The text in parts: special tokens by their numbers, and what is between them."""
    parts: list[_Format] = []
    at = begin = 0
    while at < len(text):
        found = max((name for name in special if text.startswith(name, at)), key=len, default=None)
        if found is None:
            at += 1
            continue
        if at > begin:
            parts.append({"type": "const_string", "value": text[begin:at]})
        parts.append({"type": "token", "token": special[found]})
        at = begin = at + len(found)
    return [*parts, {"type": "const_string", "value": text[begin:]}] if begin < len(text) else parts


def _json(schema: Any) -> _Format:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_SPACES}


def _sequence(parts: list[_Format]) -> _Format:
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": parts}


def _either(choices: list[_Format]) -> _Format:
    return choices[0] if len(choices) == 1 else {"type": "or", "elements": choices}
