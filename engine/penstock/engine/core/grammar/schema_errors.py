"""Find the place of a keyword in a JSON schema that a grammar library refuses: the library names only the keyword, or refuses it
only when an answer comes there."""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

_UNIMPLEMENTED = re.compile(r"^Unimplemented keys: (\[.*\])")
_FORMAT = re.compile(r"^Unknown format: (.+)")
_TYPE = re.compile(r"^Invalid type: (.+)")
_RESOURCE = re.compile(r"^(?:Resource|Pointer) '([^']+)'")
_LIMIT = re.compile(r"^Unsatisfiable schema: (\w+) \(")
_NO_SCHEMA = frozenset({"enum", "const", "default", "examples", "example", "required"})
"""Keywords whose values hold data, not schemas."""
_CHOICES = frozenset({"anyOf", "oneOf"})
"""Keywords whose values are schemas of which an answer follows one."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values map names of any kind to schemas."""


MAX_OPTIONAL = 1000
"""Properties of an object that may be left out: any of them may come next, which makes the masks of its keys slow."""


class LargeChoice(NamedTuple):
    """Objects of which an answer may be any, with many properties that may be left out between them."""

    path: str
    """Of the keyword."""
    optional: int
    """Of these properties."""
    schema: dict[str, Any]
    """The choice as a schema of its own."""


def large_choices(schema: Any) -> Iterator[LargeChoice]:
    """Choices between objects that have more than twice `MAX_OPTIONAL` such properties between them. Whether an answer comes to a
    place where any of them is next, only the library can tell."""
    root = cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    for path, node in subschemas(schema):
        for keyword in _CHOICES & node.keys():
            if (optional := _optional_among(node[keyword], root)) > 2 * MAX_OPTIONAL:
                yield LargeChoice(f"{path}.{keyword}", optional, {**shared, keyword: node[keyword]})


def _optional_among(alternatives: Any, root: dict[str, Any]) -> int:
    found, waiting, referred = 0, [alternatives], set[str]()
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += cast("list[Any]", node)
        elif isinstance(node, dict):
            members = cast("dict[str, Any]", node)
            found += _num_optional(members)
            waiting += [members[keyword] for keyword in (_CHOICES | {"allOf"}) & members.keys()]
            if isinstance(ref := members.get("$ref"), str) and ref not in referred:
                referred.add(ref)
                waiting.append(_local(ref, root))
    return found


def _local(ref: str, root: dict[str, Any]) -> Any:
    """What a reference to `$defs` or `definitions` names; None: it is another one."""
    match ref.split("/"):
        case ["#", "$defs" | "definitions" as kind, name] if isinstance(named := root.get(kind), dict):
            return cast("dict[str, Any]", named).get(name)
        case _:
            return None


def _num_optional(node: dict[str, Any]) -> int:
    """Properties of an object that may be left out."""
    properties, required = node.get("properties"), node.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return 0
    return len(cast("dict[str, Any]", properties).keys() - set(map(str, cast("list[Any]", required))))


def beyond_limits(schema: Any) -> str | None:
    """The first object with more optional properties than a grammar can have, with its path; None: there is none."""
    for path, node in subschemas(schema):
        if (optional := _num_optional(node)) > MAX_OPTIONAL:
            return f"properties has {optional} that are not required, and at most {MAX_OPTIONAL} can be, at {path}.properties"
    return None


def located(error: str, schema: Any) -> str:
    """The error with the path of the first keyword that it is about, where that can be found.

    Args:
        error: As the library gives it.
        schema: The parsed schema.
    """
    found = next((path for path, key, value in _keywords(schema) if _is_about(error, key, value)), None)
    return error if found is None else f"{error} at {found}"


def _is_about(error: str, key: str, value: Any) -> bool:
    if (unimplemented := _UNIMPLEMENTED.match(error)) is not None:
        return key in json.loads(unimplemented[1])
    if (unknown := _FORMAT.match(error)) is not None:
        return key == "format" and value == unknown[1]
    if (wrong := _TYPE.match(error)) is not None:
        return key == "type" and wrong[1] in (value if isinstance(value, list) else [value])
    if (missing := _RESOURCE.match(error)) is not None:
        return key == "$ref" and str(value).removeprefix("#") == missing[1]
    if (limit := _LIMIT.match(error)) is not None:
        return key == limit[1] and f"{key} ({value})" in error
    return key == "oneOf" and error.startswith("oneOf ")


def _keywords(schema: Any) -> Iterator[tuple[str, str, Any]]:
    """Path, name and value of every keyword."""
    for path, node in subschemas(schema):
        for key, value in node.items():
            yield f"{path}.{key}", key, value


def subschemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """A schema and all within it, each with its path. A loop, since a schema may nest deeper than Python calls."""
    waiting: list[tuple[str, Any, bool]] = [("$", schema, False)]
    while waiting:
        path, node, named = waiting.pop()
        children: list[tuple[str, Any, bool]] = []
        if isinstance(node, list):
            children = [(f"{path}[{at}]", child, False) for at, child in enumerate(cast("list[Any]", node))]
        elif isinstance(node, dict):
            members = cast("dict[str, Any]", node)
            if not named:
                yield path, members
            for key, value in members.items():
                if named or key not in _NO_SCHEMA:
                    children.append((f"{path}.{key}", value, not named and key in _NAMED))
        waiting += reversed(children)
