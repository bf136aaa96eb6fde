"""Lays one partial pod template over another as server-side apply would: maps field by field, lists by their keys.

The keys are those of Kubernetes' OpenAPI (`x-kubernetes-list-map-keys`); a list that is not named here is replaced as a whole.
"""

from collections.abc import Mapping
from typing import Any, Final, cast

from penstock.operator.objects import Object

# Last two names of a list's path → the fields that tell its items apart, and their defaults.
LIST_KEYS: Final[dict[str, dict[str, Any]]] = {
    "containers": {"name": None},
    "initContainers": {"name": None},
    "volumes": {"name": None},
    "env": {"name": None},
    "ports": {"containerPort": None, "protocol": "TCP"},
    "volumeMounts": {"mountPath": None},
    "volumeDevices": {"devicePath": None},
    "imagePullSecrets": {"name": ""},
    "hostAliases": {"ip": None},
    "topologySpreadConstraints": {"topologyKey": None, "whenUnsatisfiable": None},
    "resourceClaims": {"name": None},
    "claims": {"name": None},
    "schedulingGates": {"name": None},
}


class OverlayError(ValueError):
    """The overlay cannot be laid over the base; the message names the path."""


def mapping(value: Any) -> Mapping[str, Any]:
    """Return an object of a template, or an empty one in place of any other type. The API server refuses that and names its
    place."""
    return cast(Mapping[str, Any], value) if isinstance(value, dict) else {}


def merge(base: Object, overlay: Object, path: str = "template") -> Object:
    """`base` with the fields of `overlay`; neither is changed. A null in the overlay is as if absent.

    Raises:
        OverlayError: an item of a keyed list lacks its key, comes twice, or a field has another shape than in the base.
    """
    merged = dict(base)
    for name, value in overlay.items():
        if value is None:
            continue
        here = f"{path}.{name}"
        old = merged.get(name)
        if isinstance(value, dict):
            if old is not None and not isinstance(old, dict):
                raise OverlayError(f"{here} must not be an object")
            merged[name] = merge(cast(Object, old or {}), cast(Object, value), here)
        elif isinstance(value, list) and name in LIST_KEYS:
            if old is not None and not isinstance(old, list):
                raise OverlayError(f"{here} must not be a list")
            merged[name] = _merge_lists(cast(list[Any], old or []), cast(list[Any], value), LIST_KEYS[name], here)
        elif isinstance(old, dict):
            raise OverlayError(f"{here} must be an object")
        # The fields of a spec and of a list's items are Kubernetes' own, unlike labels, of which one may well be called `env`.
        elif (isinstance(old, list) or (name in LIST_KEYS and path.endswith(("]", ".spec")))) and not isinstance(value, list):
            raise OverlayError(f"{here} must be a list")
        else:
            merged[name] = value
    return merged


def _merge_lists(base: list[Any], overlay: list[Any], keys: dict[str, Any], path: str) -> list[Any]:
    """`base` in its order, each item under the overlay's item of the same key; then the overlay's other items."""
    merged = {key_of(item, keys, path): item for item in base}
    seen: set[tuple[Any, ...]] = set()
    for item in overlay:
        key = key_of(item, keys, path)
        if key in seen:
            raise OverlayError(f"{path}: {dict(zip(keys, key, strict=True))} comes twice")
        seen.add(key)
        label = ",".join(str(part) for part in key)
        merged[key] = merge(merged.get(key, {}), item, f"{path}[{label}]")
    return list(merged.values())


def key_of(item: Any, keys: dict[str, Any], path: str) -> tuple[Any, ...]:
    """What tells an item of a keyed list apart.

    Raises:
        OverlayError: the item is no object, lacks a key, or has a list or an object for one.
    """
    if not isinstance(item, dict):
        raise OverlayError(f"{path}: each item must be an object with {' and '.join(keys)}")
    entry = cast(Object, item)
    for name, default in keys.items():
        if entry.get(name) is None and default is None:
            raise OverlayError(f"{path}: an item lacks {name}")
        if isinstance(entry.get(name), dict | list):
            raise OverlayError(f"{path}: {name} must be a string or a number")
    return tuple(entry.get(name, default) for name, default in keys.items())


def covers(live: Any, wanted: Any, name: str = "") -> bool:
    """Whether `live` already holds every field of `wanted`; fields that only `live` has are someone else's.

    Absent and empty (or false) are the same: the API server drops empty fields.
    """
    if isinstance(wanted, dict) and isinstance(live, dict):
        held, asked = cast(Object, live), cast(Object, wanted)
        return all(covers(held[key], value, key) if key in held else _empty(value) for key, value in asked.items())
    if isinstance(wanted, list) and isinstance(live, list):
        return _covers_list(cast(list[Any], live), cast(list[Any], wanted), LIST_KEYS.get(name, {}))
    return wanted is None or bool(live == wanted)


def _empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _covers_list(live: list[Any], wanted: list[Any], keys: dict[str, Any]) -> bool:
    first = next(iter(keys), None)
    # Service ports have the name of container ports and other keys: items without the key are compared in order.
    if first is not None and all(isinstance(item, dict) and first in item for item in (*live, *wanted)):
        by_key = {tuple(item.get(key, default) for key, default in keys.items()): item for item in live}
        found = [by_key.get(tuple(item.get(key, default) for key, default in keys.items())) for item in wanted]
        return all(old is not None and covers(old, item) for old, item in zip(found, wanted, strict=True))
    return len(live) == len(wanted) and all(covers(old, item) for old, item in zip(live, wanted, strict=True))
