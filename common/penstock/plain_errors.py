"""Errors in words for people, msgspec's above all."""

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from penstock.suggest import suggestion

_KINDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_UNITS: Final = {"str": "character", "array": "item", "object": "field"}
_LIMITS: Final = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
_WRONG_TYPE: Final = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_LENGTH: Final = re.compile(r"Expected `(\w+)` of length (>=|<=)? ?(\d+)(?:, got \d+)?")
_LIMIT: Final = re.compile(r"Expected `(?:int|float)` (>=|<=|>|<) (\S+)")


def words_of(error: BaseException) -> str:
    """What an error says; its name where it says nothing, as a timeout does."""
    return str(error) or type(error).__name__


class Wrong(NamedTuple):
    """What is wrong with checked data."""

    field: str
    """`a.b[0]`; empty for the whole."""
    problem: str
    """A clause whose subject is the field: `must be a string, not a list`."""

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}" if self.field else self.problem


def explained(error: msgspec.ValidationError, kind: Any = None) -> Wrong:
    """What a `ValidationError` says.

    Args:
        kind: The type that was asked for, whose names and values are suggested; None: none are.
    """
    text, _, place = str(error).partition(" - at `")
    # "`key` in `$.a`" is a key of an object, "`$.a[...]`" one of its values.
    is_key, path = place.startswith("key"), place.rpartition("$")[2].rstrip("`")
    field = path.lstrip(".").replace("[...]", "")
    if match := re.fullmatch(r"Object missing required field `(.+)`", text):
        return Wrong(_joined(field, match[1]), "is missing")
    if match := re.fullmatch(r"Object contains unknown field `(.+)`", text):
        return Wrong(_joined(field, match[1]), "there is no such field" + suggestion(match[1], field_names(kind, field)))
    part = "a key " if is_key else "a value " if path.endswith("[...]") else ""
    return Wrong(field, part + _problem(text, _choices(kind, field)))


def field_names(kind: Any, path: str = "") -> tuple[str, ...]:
    """The fields that a struct has at a path such as `stream_options`; empty where there is none."""
    found = _at(kind, path)
    return tuple(field.encode_name for field in found.fields) if isinstance(found, msgspec.inspect.StructType) else ()


def _problem(text: str, choices: Sequence[Any]) -> str:
    if match := re.fullmatch(r"Invalid (?:enum )?value (.*)", text):
        return f"must be {_either(sorted(map(str, choices)))}, not {match[1]}" if choices else f"cannot be {match[1]}"
    if match := _WRONG_TYPE.fullmatch(text):
        wanted = [name for name in match[1].split(" | ") if name != "null"]
        given = "a fraction" if match[2] == "float" and "int" in wanted else _KINDS.get(match[2], match[2])
        return f"must be {_either([_KINDS.get(name, name) for name in wanted])}, not {given}"
    if match := _LENGTH.fullmatch(text):
        limit = f"{_LIMITS[match[2]]} " if match[2] else ""
        return f"must have {limit}{plural(int(match[3]), _UNITS.get(match[1], 'item'))}"
    if match := _LIMIT.fullmatch(text):
        return f"must be {_LIMITS[match[1]]} {match[2].removesuffix('.0')}"
    if "out of range" in text:
        return "is a number out of range"
    return text.replace("`", "")


def plural(count: int, unit: str) -> str:
    """`1 item`, `2 items`."""
    return f"{count} {unit}{'' if count == 1 else 's'}"


def _either(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _choices(kind: Any, path: str) -> Sequence[Any]:
    """The values that a field can have, where they can be listed."""
    found = _at(kind, path)
    parts = found.types if isinstance(found, msgspec.inspect.UnionType) else (found,)
    return [value for part in parts if isinstance(part, msgspec.inspect.LiteralType) for value in part.values]


def _at(kind: Any, path: str) -> msgspec.inspect.Type | None:
    """The type at a path, without null; None where there is no single one."""
    if kind is None:
        return None
    found = _not_null(msgspec.inspect.type_info(kind))
    for name in [name for name in re.sub(r"\[\d*\]", "", path).split(".") if name]:
        if isinstance(found, msgspec.inspect.ListType | msgspec.inspect.VarTupleType):
            found = _not_null(found.item_type)
        if not isinstance(found, msgspec.inspect.StructType):
            return None
        fields = {field.encode_name: field.type for field in found.fields}
        if name not in fields:
            return None
        found = _not_null(fields[name])
    return found


def _not_null(found: msgspec.inspect.Type) -> msgspec.inspect.Type:
    if isinstance(found, msgspec.inspect.UnionType):
        rest = [it for it in found.types if not isinstance(it, msgspec.inspect.NoneType)]
        return _not_null(rest[0]) if len(rest) == 1 else found
    return _not_null(found.type) if isinstance(found, msgspec.inspect.Metadata) else found
