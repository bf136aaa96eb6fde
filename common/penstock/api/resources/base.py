"""What the resources' classes share: rules that hold between fields, bounded types, durations."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, WithJsonSchema, model_validator
from pydantic.alias_generators import to_camel, to_snake
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from penstock.api.labels import GROUP, VERSION

RFC1123: str = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"

Duration = Annotated[str, Field(pattern=r"^([0-9]{1,6}(ms|s|m|h))+$", min_length=2, max_length=32)]
"""Numbers with units, such as `40ms`, `90s` or `1h30m`."""
ServedName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/:-]*[A-Za-z0-9])?$", min_length=1, max_length=128)]
ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", min_length=1, max_length=253)]
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", min_length=1, max_length=64)]
"""The name of a scheme or a method."""
Share = Annotated[
    Annotated[int, Field(ge=0, le=1000)] | Annotated[str, Field(pattern=r"^([1-9][0-9]?|100)%$", max_length=4)],
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "minimum": 0,
            "maximum": 1000,
            "pattern": "^([1-9][0-9]?|100)%$",
            "maxLength": 4,
        }
    ),
]
"""A number of replicas, or percent of them, as in Kubernetes' own kinds."""
Uri = Annotated[str, Field(min_length=1, max_length=1024)]
URI_SCHEMES = r"^((hf|file|pvc|s3)://.|/.)"

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(duration: str) -> float:
    """The length of a `Duration` that was already checked, in seconds."""
    return sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"([0-9]+)(ms|s|m|h)", duration))


@dataclass(frozen=True)
class Rule:
    """A rule between fields, in both forms: for the API server (CEL) and for where there is none (`holds`)."""

    cel: str
    """Expression over `self`; empty where the API server enforces the rule by other means."""
    message: str
    """A sentence that says what to change."""
    holds: Callable[[Any], bool]


def lasting(part: str, field: str, least: str, most: str) -> Rule:
    """A duration is within bounds, where it is given.

    Args:
        part: Where the field is, as messages begin; empty for the spec itself.
        field: Its name as in YAML.
        least: As a `Duration`.
        most: Likewise.
    """
    name, low, high = to_snake(field), seconds(least), seconds(most)

    def holds(value: Any) -> bool:
        text = getattr(value, name)
        return text is None or low <= seconds(text) <= high

    given = f"duration(self.{field})"
    return Rule(
        f"!has(self.{field}) || ({given} >= duration('{least}') && {given} <= duration('{most}'))",
        f"{part}: {field} must be from {least} to {most}".removeprefix(": "),
        holds,
    )


@dataclass(frozen=True)
class Flag:
    """The flag of `penstock serve` that a field becomes, as an annotation of the field."""

    name: str
    given: Callable[[Any], Any] = lambda value: value
    """Maps the field's value to the flag's value. None leaves the flag out."""


def flags(part: "Part") -> Iterator[str]:
    """The flags of a part and of the parts below it, `--flag=value` each, in the order of the fields; absent fields have none."""
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if isinstance(value, Part):
            yield from flags(value)
        for flag in (it for it in field.metadata if isinstance(it, Flag)):
            given = None if value is None else flag.given(value)
            if given is not None:
                yield f"{flag.name}={given}"


URI_RULE = Rule(
    f"self.uri.matches('{URI_SCHEMES}')",
    "source: uri must be an absolute path or begin with hf://, file://, pvc:// or s3://",
    lambda source: re.match(URI_SCHEMES, source.uri) is not None,
)


def unchangeable(field: str, message: str) -> Rule:
    """A field keeps the value that it was made with. Only the API server knows both, so elsewhere it always holds."""
    return Rule(f"self.{field} == oldSelf.{field}", message, lambda _: True)


class Part(BaseModel):
    """A part of a resource. Unknown fields are errors, and field names are camelCase as in YAML."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )
    RULES: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _check_rules(self) -> "Part":
        for rule in self.RULES:
            if not rule.holds(self):
                raise ValueError(rule.message)
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        rules = [{"rule": rule.cel, "message": rule.message} for rule in cls.RULES if rule.cel]
        if rules:
            handler.resolve_ref_schema(schema)["x-kubernetes-validations"] = rules
        return schema


class LocalReference(Part):
    """Another object of the same namespace."""

    name: ObjectName
    """Its name."""


class Served(Part):
    """The names that clients put in `model`."""

    name: ServedName
    """The name that answers carry too. Of several claims on one name in the cluster the oldest resource wins."""
    aliases: list[ServedName] = Field(default=[], max_length=16, json_schema_extra={"x-kubernetes-list-type": "set"})
    """More names for the same model."""


class Condition(Part):
    """One observation about a resource, by the Kubernetes API conventions."""

    type: str = Field(max_length=64)
    """What is observed, such as `Ready`."""
    status: str = Field(json_schema_extra={"enum": ["True", "False", "Unknown"]}, max_length=7)
    """`True`, `False` or `Unknown`."""
    reason: str = Field(max_length=128)
    """Why, in one CamelCase word for machines."""
    message: str = Field(max_length=32768)
    """Why, in a sentence for people."""
    observed_generation: int = Field(ge=0)
    """The generation of the spec that this was observed for."""
    last_transition_time: str = Field(max_length=32, json_schema_extra={"format": "date-time"})
    """When `status` last changed."""


Conditions = Annotated[
    list[Condition],
    Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
]


def body(resource: dict[str, Any], kind: str) -> dict[str, Any]:
    """The `metadata` and `spec` of a resource that is to be of `kind`.

    Raises:
        ValueError: it is of another kind or version.
    """
    wanted, given = (f"{GROUP}/{VERSION}", kind), (resource.get("apiVersion"), resource.get("kind"))
    if given != wanted:
        raise ValueError(f"expected kind {kind} of {wanted[0]}, got kind {given[1]} of {given[0]}")
    return {"metadata": resource.get("metadata", {}), "spec": resource.get("spec", {})}


class ResourceMeta(BaseModel):
    """The part of `metadata` that Penstock reads."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, frozen=True)

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
