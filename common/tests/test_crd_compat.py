"""One version that only grows: additions pass, and whatever narrows or changes what is there is said."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.resources import crds
from penstock.api.resources.compat import breaking

Object = dict[str, Any]
OLD = crds()[0]


def schema(crd: Object) -> Object:
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def nodes(node: Object, path: str = "") -> list[tuple[str, Object]]:
    """All nodes with their paths, the root first."""
    found = [(path, node)]
    for name, child in node.get("properties", {}).items():
        found += nodes(child, f"{path}.{name}".lstrip("."))
    if "items" in node:
        found += nodes(node["items"], f"{path}[]")
    return found


PATHS = [path for path, _ in nodes(schema(OLD))]


def changed(path: str) -> tuple[Object, Object]:
    """A copy of the CRD, and one of its nodes."""
    new = copy.deepcopy(OLD)
    return new, dict(nodes(schema(new)))[path]


def test_the_same_is_fine_and_so_is_more() -> None:
    assert breaking(OLD, copy.deepcopy(OLD)) == []
    new, pool = changed("spec.pools[]")
    pool["properties"]["added"] = {"type": "object", "required": ["x"], "properties": {"x": {"type": "string"}}}
    pool["x-kubernetes-validations"] = []  # a rule less
    _, policy = next((path, node) for path, node in nodes(schema(new)) if path == "spec.routing.policy")
    policy["enum"].append("New")
    dict(nodes(schema(new)))["spec.pools[].cost"]["maximum"] *= 2
    assert breaking(OLD, new) == []


@given(st.sampled_from([path for path in PATHS if path]))
def test_whatever_goes_is_said(path: str) -> None:
    if path.endswith("[]"):
        return  # a list's items go with the list
    parent, _, name = path.rpartition(".")
    new, node = changed(parent)
    del node["properties"][name]
    assert f"{path} is gone" in breaking(OLD, new)


@given(st.data())
def test_whatever_narrows_is_said(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(PATHS))
    new, node = changed(path)
    way = data.draw(st.sampled_from(["type", "bound", "enum", "rule", "required", "default"]))
    match way:
        case "type":
            node["type"] = "other"
        case "bound":
            bounds = [key for key in ("maximum", "maxLength", "maxItems") if key in node]
            if not bounds:
                return
            node[bounds[0]] -= 1
        case "enum":
            node["enum"] = node.get("enum", ["a", "b"])[1:]
        case "rule":
            node.setdefault("x-kubernetes-validations", []).append({"rule": "false", "message": "never"})
        case "required":
            optional = [name for name in node.get("properties", {}) if name not in node.get("required", [])]
            if not optional:
                return
            node["required"] = [*node.get("required", []), optional[0]]
        case _:
            node["default"] = "another"
    (said,) = breaking(OLD, new)
    assert said.startswith(path or "the object") or way == "required"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({}, []),
        ({"status": {"storedVersions": ["v1alpha1"]}}, []),
        (
            {"status": {"storedVersions": ["v1alpha0", "v1alpha1"]}},
            ["objects are stored as v1alpha0, which is not known any more"],
        ),
    ],
)
def test_what_is_stored_must_be_known(status: Object, said: list[str]) -> None:
    assert breaking({**OLD, **status}, OLD) == said
