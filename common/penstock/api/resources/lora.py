"""LoraAdapter: an adapter served on top of an InferenceModel of the same namespace."""

import re
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from penstock.api.resources.base import (
    URI_RULE,
    Conditions,
    LocalReference,
    Part,
    ResourceMeta,
    Rule,
    Served,
    Uri,
    body,
    unchangeable,
)

UPWARDS = "/[.][.](/|$)"


class AdapterOrigin(Part):
    """Where the adapter's weights are. No secret: the model's `lora.sources` is the allow-list."""

    RULES = (
        URI_RULE,
        Rule(
            f"!self.uri.matches('{UPWARDS}')",
            "source: uri may not lead upwards by '..'; write the path as it is",
            lambda source: re.search(UPWARDS, source.uri) is None,
        ),
    )

    uri: Uri
    """One of the model's `lora.sources`, or below one: `hf://ORG/NAME`, `file://PATH` or an absolute path, `pvc://CLAIM/PATH`,
    `s3://BUCKET/PATH`."""
    revision: str | None = Field(default=None, min_length=1, max_length=128)
    """Branch, tag, commit or version."""


class LoraAdapterSpec(Part):
    """What is wanted."""

    RULES = (unchangeable("modelRef", "modelRef cannot change: delete the adapter, and create it for the other model"),)

    model_ref: LocalReference
    """The InferenceModel that the adapter belongs to."""
    served: Served
    """The names that clients use for the model with this adapter."""
    source: AdapterOrigin
    """Where the adapter's weights are."""


class LoraAdapterStatus(Part):
    """What was observed."""

    observed_generation: int = Field(default=0, ge=0)
    """The generation of the spec that this status is about."""
    ready: str = Field(default="", max_length=32)
    """Ready replicas of the model that serve the adapter / all of its ready replicas."""
    conditions: Conditions = Field(default=[])
    """`Ready` sums up the others."""


class LoraAdapter(BaseModel):
    """A LoRA adapter that is served."""

    model_config = ConfigDict(frozen=True)

    metadata: ResourceMeta
    spec: LoraAdapterSpec

    @classmethod
    def parse(cls, resource: dict[str, Any]) -> Self:
        """Checks a resource as YAML or the API server give it. Errors are those of `InferenceModel.parse`."""
        return cls.model_validate(body(resource, "LoraAdapter"))
