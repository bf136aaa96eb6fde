"""pydantic's errors about a resource, in words for people."""

from collections.abc import Callable, Mapping
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError

from penstock.plain_errors import plural
from penstock.suggest import suggestion

Context = Mapping[str, Any]

_TYPES: Final = {
    "string_type": "a string",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}
_RULES: Final[Mapping[str, Callable[[Context], str]]] = {
    "string_too_short": lambda of: f"must have at least {plural(of['min_length'], 'character')}",
    "string_too_long": lambda of: f"must have at most {plural(of['max_length'], 'character')}",
    "too_short": lambda of: f"must have at least {plural(of['min_length'], 'item')}",
    "too_long": lambda of: f"must have at most {plural(of['max_length'], 'item')}",
    "literal_error": lambda of: f"must be {of['expected']}",
    "greater_than_equal": lambda of: f"must be at least {of['ge']}",
    "less_than_equal": lambda of: f"must be at most {of['le']}",
    "greater_than": lambda of: f"must be above {of['gt']}",
    "less_than": lambda of: f"must be below {of['lt']}",
}


def faults(error: ValidationError, kind: type[BaseModel]) -> str:
    """What is wrong with each field, separated by semicolons.

    Args:
        kind: What was checked; names of fields are suggested from it.
    """
    return "; ".join(_fault(it, kind) for it in error.errors(include_url=False))


def _fault(fault: Any, kind: type[BaseModel]) -> str:
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).lstrip(".")
    return f"{place}: {_problem(fault, kind)}" if place else _problem(fault, kind)


def _problem(fault: Any, kind: type[BaseModel]) -> str:
    name, given, context = fault["type"], fault["input"], fault.get("ctx", {})
    if name == "missing":
        return "is missing"
    if name == "extra_forbidden":
        return "there is no such field" + suggestion(str(fault["loc"][-1]), _fields(kind, fault["loc"][:-1]))
    if name in _TYPES:
        return f"must be {_TYPES[name]}, not {_shown(given)}"
    if name == "string_pattern_mismatch":
        return f"{_shown(given)} does not match {context['pattern']}"
    if name in _RULES:
        return f"{_RULES[name](context)}, not {_shown(given)}" if isinstance(given, str | int | float) else _RULES[name](context)
    return str(fault["msg"]).removeprefix("Value error, ")


def _shown(given: Any) -> str:
    match given:
        case None:
            return "null"
        case bool():
            return str(given).lower()
        case dict():
            return "an object"
        case list():
            return "a list"
        case _:
            text = repr(given)
            return text if len(text) <= 60 else f"{text[:56]}…{text[-1]}"


def _fields(kind: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """The names that the object at a path may have."""
    found: Any = kind
    for part in path:
        if isinstance(part, str):
            annotation = next((it.annotation for name, it in found.model_fields.items() if part in (name, it.alias)), None)
            found = next(iter(_models(annotation)), None)
            if found is None:
                return []
    return [it.alias or name for name, it in found.model_fields.items()]


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models in an annotation such as `list[Pool] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in _models(part)]
