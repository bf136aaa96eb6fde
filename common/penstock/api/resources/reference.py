"""The resources' fields as Markdown, for the documentation.

`python -m penstock.api.resources.reference FILE…` rewrites in each file what is between `<!-- reference: KIND -->`, or
`<!-- refused: FILE -->` with an InferenceModel that has every field, and `<!-- end -->`.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from penstock.api.resources.crd import crds
from penstock.api.resources.model import InferenceModel
from penstock.api.resources.support import unsupported

Schema = dict[str, Any]

_PATH = r"^spec\.(\S+)"
_SECTION = re.compile(r"(<!-- (reference|refused): (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def reference(kind: str) -> str:
    """The fields of a kind's spec and status, and the rules between them."""
    (crd,) = (it for it in crds() if it["spec"]["names"]["kind"] == kind)
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    parts: list[str] = []
    for part in ("spec", "status"):
        rows = [_row(path, node, required) for path, node, required in _fields(schema["properties"][part], part)]
        parts.append("\n".join([f"### {part}", "", "| field | value | default | |", "| --- | --- | --- | --- |", *rows]))
    rules = "\n".join(f"- {message}" for message in _rules(schema))
    return "\n\n".join([parts[0], f"### Rules between fields\n\n{rules}", parts[1]])


def refused(example: Path) -> str:
    """List the fields of an example InferenceModel that the operator refuses."""
    model = InferenceModel.parse(yaml.safe_load(example.read_text()))
    return "\n".join(dict.fromkeys(f"- {re.sub(_PATH, _without_names, line)}" for line in unsupported(model.spec)))


def _without_names(path: re.Match[str]) -> str:
    return "`" + re.sub(r"\[[^]]+\]", "[]", path[1]) + "`"


def with_references(text: str, folder: Path) -> str:
    """Return a document of `folder` with its generated sections renewed."""

    def written(found: re.Match[str]) -> str:
        said = reference(found[3]) if found[2] == "reference" else refused(folder / found[3])
        return f"{found[1]}\n{said}\n\n{found[4]}"

    return _SECTION.sub(written, text)


def _fields(node: Schema, path: str) -> Iterator[tuple[str, Schema, bool]]:
    """Path, schema, and whether it must be there, of all fields, in the order in which they are declared."""
    for name, child in node.get("properties", {}).items():
        here = f"{path}.{name}" + "[]" * (child.get("type") == "array")
        yield here, child, name in node.get("required", [])
        yield from _fields(child.get("items", child), here)


def _row(path: str, node: Schema, required: bool) -> str:
    default = "required" if required else f"`{_text(node['default'])}`" if node.get("default", "") != "" else ""
    said = node.get("description", "").replace("|", "\\|")
    return f"| `{path.partition('.')[2]}` | {_value(node)} | {default} | {said} |".replace(" |  |", " | |")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(node: Schema) -> str:
    """What may be written there."""
    if node.get("x-kubernetes-int-or-string"):
        return f"{node['minimum']:,} to {node['maximum']:,}, or percent"
    match node["type"]:
        case "array":
            items = node["items"]
            of = "" if items["type"] == "object" else f": {_value(items)}"
            return f"list, at most {node['maxItems']}{of}"
        case "object" if "additionalProperties" in node:
            return f"map, at most {node['maxProperties']}: {_value(node['additionalProperties'])}"
        case "object":
            return "object"
        case "boolean":
            return "boolean"
        case "integer" if "maximum" in node:
            return f"{node['minimum']:,} to {node['maximum']:,}"
        case "integer":
            return "integer"
        case _ if "enum" in node:
            return ", ".join(f"`{value}`" for value in node["enum"])
        case _ if str(node.get("pattern", "")).endswith("(ms|s|m|h))+$"):
            return "duration"
        case _:
            return f"text, at most {node['maxLength']:,} characters"


def _rules(node: Schema) -> Iterator[str]:
    yield from (rule["message"] for rule in node.get("x-kubernetes-validations", []))
    for child in node.get("properties", {}).values():
        yield from _rules(child.get("items", child))


def main(paths: list[str]) -> None:
    """Rewrites files in place."""
    for path in map(Path, paths):
        path.write_text(with_references(path.read_text(), path.parent))


if __name__ == "__main__":
    main(sys.argv[1:])
