"""Fields of `quantization_config`, read with a clear error."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from penstock.engine.config import ConfigError

T = TypeVar("T")
STEP = 8
"""Inputs that the kernels of linear layers read together: as in their reference, which needs torch."""
FIELD = "config.json: quantization_config"


def refuse(field: str, why: str) -> ConfigError:
    """Returns the error for a field, which is named as `weights.num_bits`."""
    return ConfigError(f"{FIELD}.{field} {why}")


def choice(raw: Mapping[str, Any], field: str, allowed: Sequence[T], default: T | None = None, where: str = "") -> T:
    """Returns a field's value, which must be one of some; ConfigError names the field, its value and those.

    Args:
        raw: What has the field.
        field: Its name.
        allowed: Values.
        default: Where it is absent.
        where: What goes before the name in the error, such as `config_groups.group_0.weights.`
    """
    value = raw.get(field, default)
    found = [each for each in allowed if each == value and isinstance(value, bool) == isinstance(each, bool)]
    if not found:
        raise refuse(where + field, f"is {value!r} (supported: {', '.join(map(str, allowed))})")
    return found[0]


def names(raw: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """Returns a field's names and `re:` patterns; none where it is absent or null."""
    found = raw.get(field) or ()
    if not isinstance(found, Sequence) or isinstance(found, str) or not all(isinstance(name, str) for name in found):
        raise refuse(field, f"is {found!r}, not a list of names")
    for name in found:
        try:
            re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
        except re.error as error:
            raise refuse(field, f"has {name!r}, which is no regular expression: {error}") from error
    return tuple(found)


def group_size(raw: Mapping[str, Any], where: str = "") -> int | None:
    """Returns how many inputs share a scale; None: all (-1). Kernels read steps of eight inputs: none is of two groups."""
    size = raw.get("group_size")
    if size == -1:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0 or size % STEP:
        raise refuse(f"{where}group_size", f"is {size!r} (supported: -1 and multiples of {STEP}, such as 128)")
    return size
