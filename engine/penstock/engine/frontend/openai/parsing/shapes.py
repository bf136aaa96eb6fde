"""Calls as the models' chat formats write them, to be written under a grammar: what `formats` reads."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from penstock.engine.frontend.openai.structured import json_text
from penstock.engine.grammar import Grammar, Tag, Tags

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class CallShape(NamedTuple):
    """A call is `head`, the name, `middle`, the arguments as JSON, and `tail`."""

    head: str
    middle: str
    tail: str
    begin: str = ""
    """Before the first call."""
    separator: str = ""
    """Between two."""
    end: str = ""
    """Text after the last call."""
    trigger: str = ""
    """The beginning of `head` that says among text that a call comes; empty: nothing does."""
    several: bool = True
    """Whether an answer may have more than one."""
    needs: tuple[str, ...] = ()
    """Special tokens without which a model does not write this shape."""


HERMES = CallShape('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n", trigger="<tool_call>")
LLAMA3_JSON = CallShape('{"name": "', '", "parameters": ', "}", separator="; ")
MISTRAL = CallShape("[TOOL_CALLS]", "[ARGS]", "", trigger="[TOOL_CALLS]", needs=("[ARGS]",))
MISTRAL_LIST = CallShape('{"name": "', '", "arguments": ', "}", begin="[TOOL_CALLS][", separator=", ", end="]")
DEEPSEEK_V3 = CallShape(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    "\n```json\n",
    "\n```<｜tool▁call▁end｜>",
    begin="<｜tool▁calls▁begin｜>",
    separator="\n",
    end="<｜tool▁calls▁end｜>",
)
DEEPSEEK_V31 = CallShape(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
)
HARMONY = CallShape("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", several=False)


def fitting(shapes: Iterable[CallShape], special_tokens: Collection[str]) -> CallShape | None:
    """The first shape that a model with these special tokens writes; None: there is none that a grammar describes."""
    return next((shape for shape in shapes if all(token in special_tokens for token in shape.needs)), None)


def forced_calls(tools: list[dict[str, Any]], shape: CallShape, name: str | None, several: bool) -> Grammar:
    """The grammar of an answer that is one call or more.

    Args:
        tools: As a chat has them, checked.
        shape: How calls are written.
        name: Of the function that is called; None: of any.
        several: Whether there may be more than one call.
    """
    functions = [tool["function"] for tool in tools]
    tags = [_tag(function, shape, at) for at, function in enumerate(functions) if name in (None, function["name"])]
    several = several and name is None and shape.several
    whole = Tags(tags=tags, free=False, begin=shape.begin, separator=shape.separator, end=shape.end, several=several)
    return _grammar(whole)


def calls_or_answer(tools: list[dict[str, Any]], shape: CallShape, answer: Grammar, several: bool) -> Grammar:
    """The grammar of an answer that is calls, or text that follows a schema.

    Args:
        tools: As a chat has them, checked.
        shape: How calls are written.
        answer: The schema of the text.
        several: Whether there may be more than one call.
    """
    schema = msgspec.json.decode(answer.text)
    if isinstance(schema, dict) and answer.lenient:
        schema = {"x-guidance": {"lenient": True}} | schema
    calls = msgspec.json.decode(forced_calls(tools, shape, None, several).text, type=Tags)
    return _grammar(msgspec.structs.replace(calls, answer=[schema]), answer.param)


def strict_calls(tools: list[dict[str, Any]], shape: CallShape) -> Grammar:
    """The grammar of free text with calls in it, of which those of strict functions follow their schemas.

    Args:
        tools: As a chat has them, checked.
        shape: How calls are written; it has a `trigger`.
    """
    functions = [tool["function"] for tool in tools]
    return _grammar(Tags(tags=[_tag(function, shape, at) for at, function in enumerate(functions)], free=True))


def _grammar(tags: Tags, param: str = "tools") -> Grammar:
    return Grammar("tags", msgspec.json.encode(tags).decode(), param)


def _tag(function: Mapping[str, Any], shape: CallShape, at: int) -> Tag:
    schema: dict[str, Any] = _NO_PARAMETERS if function.get("parameters") is None else function["parameters"]
    json_text(schema, f"tools[{at}].function.parameters")
    if not function.get("strict"):
        # Enforced as far as can be: its author asked for no more.
        own = schema.get("x-guidance")
        schema = {**schema, "x-guidance": {"lenient": True, **(own if isinstance(own, dict) else {})}}
    return Tag(shape.head + function["name"] + shape.middle, schema, shape.tail, shape.trigger)
