"""Fields of a checkpoint's `config.json`. No torch."""

from collections.abc import Mapping
from typing import Any

from penstock.engine.config import ConfigError


def whole_number(raw: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """A field's positive whole number, or the default if the field is absent or null; ConfigError if it is anything else."""
    value = raw.get(field)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {field} must be a positive whole number, not {value!r}")
    return value
