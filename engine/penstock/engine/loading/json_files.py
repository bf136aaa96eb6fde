"""The JSON files of a checkpoint."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.engine.config import ConfigError
from penstock.plain_errors import explained

T = TypeVar("T")


def read_object(file: Path) -> dict[str, Any]:
    """Reads a JSON object; `ConfigError` names the file and what is wrong in it."""
    return read_json(file, dict[str, Any])


def read_json(file: Path, kind: type[T]) -> T:
    """Reads a JSON file of a type; `ConfigError` names the file and what is wrong in it."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {explained(error, kind)}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from error
