"""Where in a JSON schema the keyword is that a grammar library refuses: it names the keyword alone."""

import json
import re
from collections.abc import Iterator
from typing import Any, cast

_UNIMPLEMENTED = re.compile(r"^Unimplemented keys: (\[.*\])")
_FORMAT = re.compile(r"^Unknown format: (.+)")
_NO_SCHEMA = frozenset({"enum", "const", "default", "examples", "example", "required"})
"""Keywords whose values hold data, not schemas."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose values map names of any kind to schemas."""


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
    return key == "oneOf" and error.startswith("oneOf ")


def _keywords(schema: Any) -> Iterator[tuple[str, str, Any]]:
    """Path, name and value of every keyword. A loop, since a schema may nest deeper than Python calls."""
    waiting: list[tuple[str, Any, bool]] = [("$", schema, False)]
    while waiting:
        path, node, named = waiting.pop()
        children: list[tuple[str, Any, bool]] = []
        if isinstance(node, list):
            children = [(f"{path}[{at}]", child, False) for at, child in enumerate(cast("list[Any]", node))]
        elif isinstance(node, dict):
            for key, value in cast("dict[str, Any]", node).items():
                if not named:
                    yield f"{path}.{key}", key, value
                if named or key not in _NO_SCHEMA:
                    children.append((f"{path}.{key}", value, not named and key in _NAMED))
        waiting += reversed(children)
