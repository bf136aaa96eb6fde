"""The tenants file: YAML or JSON, checked, with errors that name the line and never quote what stands there (keys do)."""

import hashlib
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
import yaml

from penstock.gateway.tenants.tenant import Limits

ANONYMOUS = "anonymous"
"""Name of those who bring no key."""
SHORTEST_KEY = 8
_HASHED = "sha256:"


class TenantsError(ValueError):
    """A tenants file that cannot be used; the message says where and why."""


class Entry(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """One tenant of the file."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
    keys: tuple[str, ...] = ()
    """API keys, each in clear or as `sha256:` and the hash in hex."""

    @property
    def limits(self) -> Limits:
        """What the tenant may do."""
        return Limits(**{field: getattr(self, field) for field in Limits.__struct_fields__})


class TenantsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """All of the file."""

    tenants: list[Entry] = []
    anonymous: Literal["allow", "deny"] | Limits = "deny"
    """Whether requests without a key are served, and what they may do."""
    pass_keys: bool = False
    """Whether replicas get to see the client's key."""


def parse(text: str) -> TenantsFile:
    """Reads a tenants file.

    Raises:
        TenantsError: it cannot be used; the message names the line.
    """
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        content = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark or error.context_mark
        raise TenantsError(f"{f'line {at.line + 1}: ' if at else ''}not YAML: {error.problem}") from None
    except yaml.YAMLError:
        raise TenantsError("not YAML: it has characters that may not stand in text") from None
    except ValueError:  # of YAML's own types, whose errors quote what stands there
        raise TenantsError("not YAML: a date or a number in it is none") from None
    except RecursionError:
        raise TenantsError("lists in it go too deep") from None
    lines: dict[str, int] = {}
    try:
        lines.update(() if root is None else _lines(root, "$"))
        file = msgspec.convert({} if content is None else content, TenantsFile)
    except RecursionError:
        raise TenantsError("lists in it go too deep, or hold themselves") from None
    except msgspec.ValidationError as error:
        raise TenantsError(_placed(str(error), lines)) from None
    _check(file, lines)
    return file


def digest(key: str) -> bytes:
    """The SHA-256 of a key, whichever way the file says it; ValueError for a hash that is none."""
    if key.startswith(_HASHED):
        hashed = bytes.fromhex(key.removeprefix(_HASHED))
        if len(hashed) != hashlib.sha256().digest_size:
            raise ValueError
        return hashed
    return hashlib.sha256(key.encode()).digest()


def _check(file: TenantsFile, lines: dict[str, int]) -> None:
    names: set[str] = set()
    digests: dict[bytes, str] = {}
    for at, entry in enumerate(file.tenants):
        if entry.name in names or entry.name == ANONYMOUS:
            why = "is what those without a key are called" if entry.name == ANONYMOUS else "is there twice"
            raise _error(f"$.tenants[{at}].name", f"tenant {entry.name} {why}", lines)
        names.add(entry.name)
        for number, key in enumerate(entry.keys):
            path = f"$.tenants[{at}].keys[{number}]"
            if not key.isascii() or not key.isprintable() or " " in key or len(key) < SHORTEST_KEY:
                message = f"a key is at least {SHORTEST_KEY} printable ASCII characters without spaces"
                raise _error(path, message, lines)
            try:
                known = digests.setdefault(digest(key), path)
            except ValueError:
                raise _error(path, "a hashed key is `sha256:` and 64 hexadecimal digits", lines) from None
            if known != path:
                raise _error(path, f"the same key stands at {_where(known, lines)}", lines)


def _lines(node: yaml.Node, path: str) -> Iterator[tuple[str, int]]:
    """The line of every field, by its path as msgspec writes it; raises `TenantsError` for a field that is there twice."""
    yield path, node.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode):
        for at, item in enumerate(node.value):
            yield from _lines(item, f"{path}[{at}]")
    elif isinstance(node, yaml.MappingNode):
        seen: set[Any] = set()
        for key, value in node.value:
            if key.value in seen:
                raise TenantsError(f"line {key.start_mark.line + 1}: {path}: {key.value} is there twice")
            seen.add(key.value)
            for inner, line in _lines(value, f"{path}.{key.value}"):
                yield inner, key.start_mark.line + 1 if inner == f"{path}.{key.value}" else line


def _placed(message: str, lines: dict[str, int]) -> str:
    """msgspec's words, with the line of what they are about."""
    what, _, path = message.partition(" - at ")
    path = path.strip("`") or "$"
    unknown = re.search(r"unknown field `(.*)`", what)
    line = lines.get(f"{path}.{unknown[1]}" if unknown else path, lines.get(path))
    return f"{f'line {line}: ' if line else ''}{path}: {what}"


def _where(path: str, lines: dict[str, int]) -> str:
    return f"line {lines[path]}" if path in lines else path


def _error(path: str, message: str, lines: dict[str, int]) -> TenantsError:
    return TenantsError(f"{_where(path, lines)}: {path}: {message}")
