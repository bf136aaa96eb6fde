"""Whether one CRD may take the place of another: there is one version, and it only grows."""

from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

_LEAST = ("minimum", "minLength", "minItems")
_MOST = ("maximum", "maxLength", "maxItems", "maxProperties")
_SAME = (
    "type",
    "pattern",
    "default",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-int-or-string",
)


def breaking(old: Schema, new: Schema) -> list[str]:
    """What stands against `new` in the place of `old`, as kubectl gives it or from a file; empty: `new` only adds.

    Objects that `old` takes must be taken and mean the same, and every version that objects are stored in must still be known.
    """
    versions = {version["name"]: version["schema"]["openAPIV3Schema"] for version in new["spec"]["versions"]}
    stored = old.get("status", {}).get("storedVersions", [version["name"] for version in old["spec"]["versions"]])
    found = [f"objects are stored as {name}, which is not known any more" for name in stored if name not in versions]
    if old["spec"]["scope"] != new["spec"]["scope"]:
        found.append(f"scope: {old['spec']['scope']} became {new['spec']['scope']}")
    for version in old["spec"]["versions"]:
        if version["name"] in versions:
            found.extend(_narrower(version["schema"]["openAPIV3Schema"], versions[version["name"]], ""))
    return found


def _narrower(old: Schema, new: Schema, path: str) -> Iterator[str]:
    here = path or "the object"
    for key in _SAME:
        if old.get(key) != new.get(key):
            yield f"{here}: {key} was {_said(old.get(key))} and is {_said(new.get(key))}"
    for keys, sign in ((_LEAST, 1), (_MOST, -1)):
        for key in keys:
            if key in new and (key not in old or sign * new[key] > sign * old[key]):
                yield f"{here}: {key} was {_said(old.get(key))} and is {new[key]}"
    if "enum" in new:
        gone = [value for value in old.get("enum", ["other values"]) if value not in new["enum"]]
        yield from (f"{here}: {value} is not allowed any more" for value in gone)
    known = {rule["rule"] for rule in old.get("x-kubernetes-validations", [])}
    for rule in new.get("x-kubernetes-validations", []):
        if rule["rule"] not in known:
            yield f"{here}: a new rule: {rule['message']}"
    for name in new.get("required", []):
        if name not in old.get("required", []):
            yield f"{path}.{name}".lstrip(".") + " is required now"
    for name, child in old.get("properties", {}).items():
        where = f"{path}.{name}".lstrip(".")
        if name not in new.get("properties", {}):
            yield f"{where} is gone"
        else:
            yield from _narrower(child, new["properties"][name], where)
    for inner in ("items", "additionalProperties"):
        if inner in old and inner in new:
            yield from _narrower(old[inner], new[inner], f"{path}[]")


def _said(value: Any) -> str:
    return "not set" if value is None else str(value)
