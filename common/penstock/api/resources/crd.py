"""The CustomResourceDefinitions, generated from the classes.

pydantic's JSON schema becomes a *structural* schema as the API server demands it: no `$ref`, no `anyOf` for absent values, no
`additionalProperties: false` (unknown fields are pruned, and kubectl refuses them by strict validation).
"""

from typing import Any

from pydantic import BaseModel

from penstock.api.labels import GROUP, VERSION
from penstock.api.resources.base import Part, Rule
from penstock.api.resources.lora import LoraAdapter, LoraAdapterSpec, LoraAdapterStatus
from penstock.api.resources.model import NAME_RULE, InferenceModel, InferenceModelSpec
from penstock.api.resources.model_status import InferenceModelStatus

Schema = dict[str, Any]


def _condition(kind: str, field: str) -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{field}'


def _wide(name: str, path: str) -> dict[str, Any]:
    """A column that `kubectl get -o wide` adds."""
    return {"name": name, "type": "string", "jsonPath": path, "priority": 1}


STATUS_COLUMN = {"name": "Status", "type": "string", "jsonPath": _condition("Ready", "reason")}
AGE_COLUMN = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}


def crds() -> list[dict[str, Any]]:
    """The CRDs of InferenceModel and LoraAdapter, ready to apply."""
    model_columns = [
        {"name": "Model", "type": "string", "jsonPath": ".spec.served.name", "description": "What clients put in `model`"},
        {"name": "Ready", "type": "string", "jsonPath": ".status.ready", "description": "Ready replicas / wanted ones"},
        {"name": "Desired", "type": "integer", "jsonPath": ".status.desired"},
        STATUS_COLUMN,
        {"name": "URL", "type": "string", "jsonPath": ".status.url"},
        AGE_COLUMN,
        _wide("Source", ".spec.source.uri"),
        _wide("Image", ".spec.engine.image"),
        _wide("Rollout", _condition("Progressing", "reason")),
        _wide("Scaling", _condition("ScalingActive", "reason")),
        _wide("Routed", _condition("Routed", "reason")),
        _wide("Canary", ".status.canary.verdict"),
        _wide("Message", _condition("Ready", "message")),
    ]
    adapter_columns = [
        {"name": "Adapter", "type": "string", "jsonPath": ".spec.served.name", "description": "What clients put in `model`"},
        {"name": "Base", "type": "string", "jsonPath": ".spec.modelRef.name"},
        {"name": "Ready", "type": "string", "jsonPath": ".status.ready", "description": "Replicas that serve it / ready ones"},
        STATUS_COLUMN,
        AGE_COLUMN,
        _wide("Source", ".spec.source.uri"),
        _wide("Message", _condition("Ready", "message")),
    ]
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    return [
        _crd(InferenceModel, InferenceModelSpec, InferenceModelStatus, ["im"], model_columns, {"scale": scale}, [NAME_RULE]),
        _crd(LoraAdapter, LoraAdapterSpec, LoraAdapterStatus, ["la"], adapter_columns, {}, []),
    ]


def _crd(
    kind: type[BaseModel],
    spec: type[Part],
    status: type[Part],
    short_names: list[str],
    columns: list[dict[str, Any]],
    subresources: dict[str, Any],
    rules: list[Rule],
) -> dict[str, Any]:
    name = kind.__name__
    plural = f"{name.lower()}s"
    schema: Schema = {
        "type": "object",
        "description": (kind.__doc__ or "").strip(),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural(spec),
            "status": structural(status),
        },
    }
    if rules:
        schema["x-kubernetes-validations"] = [{"rule": rule.cel, "message": rule.message} for rule in rules]
    version: dict[str, Any] = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": columns,
        "subresources": {"status": {}, **subresources},
        "schema": {"openAPIV3Schema": schema},
    }
    names = {"kind": name, "listKind": f"{name}List", "plural": plural, "singular": name.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {**names, "shortNames": short_names, "categories": ["penstock"]},
            "versions": [version],
        },
    }


def structural(part: type[Part]) -> Schema:
    """A class's structural schema."""
    schema = part.model_json_schema(by_alias=True)
    return _flat(schema, schema.get("$defs", {}))


def _flat(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """`node` without references, nulls and what the API server does not know."""
    if "$ref" in node:
        definition = definitions[node["$ref"].rpartition("/")[2]]
        node = {**definition, **{key: value for key, value in node.items() if key != "$ref"}}
    if "anyOf" in node:
        (present,) = (branch for branch in node["anyOf"] if branch.get("type") != "null")
        rest = {key: value for key, value in node.items() if key not in ("anyOf", "default")}
        return _flat({**present, **rest}, definitions)
    flat = {
        key: value for key, value in node.items() if key not in ("title", "additionalProperties", "$defs", "const", "default")
    }
    if isinstance(node.get("additionalProperties"), dict):  # the values of a map
        flat["additionalProperties"] = _flat(node["additionalProperties"], definitions)
    if "const" in node:
        flat["enum"] = [node["const"]]
    # The default of an absent part would write every default below it into the user's object; leaves are enough.
    if "default" in node and node["default"] is not None and not isinstance(node["default"], dict | list):
        flat["default"] = node["default"]
    if "description" in flat:
        flat["description"] = " ".join(flat["description"].split())
    if "properties" in node:
        flat["properties"] = {name: _flat(child, definitions) for name, child in node["properties"].items()}
    if "items" in node:
        flat["items"] = _flat(node["items"], definitions)
    return flat
