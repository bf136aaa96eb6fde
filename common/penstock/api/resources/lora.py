"""LoraAdapter: an adapter served on top of an InferenceModel of the same namespace."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from penstock.api.resources.base import Conditions, LocalReference, Part, ResourceMeta, Served, Uri, body


class AdapterOrigin(Part):
    """Where the adapter's weights are. No secret: the model's `lora.sources` is the allow-list."""

    uri: Uri
    """Must begin with one of the prefixes in the model's `lora.sources`."""
    revision: str | None = Field(default=None, min_length=1, max_length=128)
    """Branch, tag, commit or version."""


class LoraAdapterSpec(Part):
    """What is wanted."""

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
