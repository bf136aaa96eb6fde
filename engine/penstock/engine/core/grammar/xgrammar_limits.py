"""What JSON schemas ask for that xgrammar would leave out or read otherwise, without an error."""

import re
from collections.abc import Mapping
from typing import Any, cast

from penstock.engine.core.grammar.schema_errors import subschemas

_JUDGING = frozenset(
    {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "type", "enum", "const", "multipleOf", "format", "pattern"}
    | {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "minLength", "maxLength"}
    | {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains", "unevaluatedItems"}
    | {"properties", "required", "patternProperties", "additionalProperties", "propertyNames", "minProperties", "maxProperties"}
    | {"dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties"}
)
"""Keywords by which instances are judged."""
_INNER_ANCHOR = re.compile(r"(?:[^\\\[^$]|\\.|\[\^?\]?(?:[^\\\]]|\\.)*\])*")
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def beyond_xgrammar(schema: Any) -> str | None:
    """The first keyword that xgrammar does not enforce as it stands, with its path; None: there is none.

    Args:
        schema: The parsed schema.
    """
    for path, node in subschemas(schema):
        judged = _JUDGING & node.keys()
        for key in sorted(judged):
            if (why := _problem(node, key, judged)) is not None:
                return f"{why} at {path}.{key}"
    return None


def _problem(node: Mapping[str, Any], key: str, judged: frozenset[str]) -> str | None:
    value = node[key]
    match key:
        case "$ref" if not str(value).startswith("#/") and value != "#":
            return "a $ref that is no path"
        case "allOf" if len(value) > 1:
            return "an allOf of several schemas"
        case "$ref" | "anyOf" | "oneOf" | "allOf" if len(judged) > 1:  # it reads the first of them and nothing beside it
            return f"{key} beside {min(judged - {key})}"
        case "enum" | "const" if judged - {key, "type"}:
            return f"{key} beside {min(judged - {key, 'type'})}"
        case "enum" | "const" if "type" in node:
            values = value if key == "enum" else [value]
            return None if all(_is_of(node["type"], each) for each in values) else f"{key} with values of another type"
        case "patternProperties":
            return "patternProperties"
        case "multipleOf" if node.get("type") != "integer":
            return "multipleOf of numbers"
        case "pattern" if judged & {"minLength", "maxLength", "format"}:
            return f"pattern beside {min(judged & {'minLength', 'maxLength', 'format'})}"
        case "pattern" if not _is_anchored(str(value)):
            return "a pattern that is not anchored at both ends"
        case "format" if judged & {"minLength", "maxLength"}:
            return f"format beside {min(judged & {'minLength', 'maxLength'})}"
        case _:
            return None


def _is_of(types: Any, value: Any) -> bool:
    """Whether a value is of a type, or of one of a list."""
    names = cast("list[str]", types) if isinstance(types, list) else [types]
    return any(type(value) in _TYPES.get(name, ()) for name in names)


def _is_anchored(pattern: str) -> bool:
    """Whether a pattern is of whole strings as it is written: xgrammar takes each for that, and passes over anchors inside."""
    inner = pattern[1:-1]
    return (
        pattern.startswith("^")
        and pattern.endswith("$")
        and not inner.endswith("\\")
        and _INNER_ANCHOR.fullmatch(inner) is not None
        and not _has_alternatives(inner)
    )


def _has_alternatives(inner: str) -> bool:
    """Whether a pattern without its anchors has alternatives outside of groups, to only one of which each anchor belongs."""
    depth = 0
    for part in re.findall(r"\\.|\[\^?\]?(?:[^\\\]]|\\.)*\]|[()|]", inner):
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            return True
    return False
