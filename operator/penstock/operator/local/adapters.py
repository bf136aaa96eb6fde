"""The LoraAdapters of a YAML file, as the local runtime serves them: engines load them as they start."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.api import fleet
from penstock.api.resources import InferenceModel, LoraAdapter
from penstock.operator.adapters.plan import accepted


class AdapterError(ValueError):
    """An adapter cannot be served; the message begins with its place in the file."""


@dataclass(frozen=True)
class PlacedAdapter:
    """An adapter and where in the file it is."""

    place: str
    adapter: LoraAdapter


def adapters_of(model: InferenceModel, models: Sequence[InferenceModel], adapters: Sequence[PlacedAdapter]) -> list[LoraAdapter]:
    """A model's adapters, as the operator would judge them on a cluster; raises `AdapterError`."""
    for one in adapters:
        named = next((it for it in models if _model_id(it) == _owner(one.adapter)), None)
        verdict = accepted(one.adapter, named, refusal="", conflict="")
        if verdict.status is not True:
            raise AdapterError(f"{one.place}: {verdict.reason}: {verdict.message}")
        if one.adapter.spec.source.revision is not None:
            raise AdapterError(f"{one.place}: spec.source.revision: only clusters load adapters by revision; name a folder")
    return [one.adapter for one in adapters if _owner(one.adapter) == _model_id(model)]


def described(adapter: LoraAdapter) -> fleet.Adapter:
    """What the gateway must know of it."""
    meta = adapter.metadata
    names = [adapter.spec.served.name, *adapter.spec.served.aliases]
    return fleet.Adapter(id=f"{meta.namespace}/{meta.name}", model=_owner(adapter), served_names=names, created=time.time())


def with_adapters(manifest: dict[str, Any], adapters: Sequence[LoraAdapter]) -> dict[str, Any]:
    """A Deployment whose engines load adapters at their start."""
    if adapters:
        modules = [f"{it.spec.served.name}={it.spec.source.uri}" for it in adapters]
        manifest["spec"]["template"]["spec"]["containers"][0]["args"] += ["--lora-modules", *modules]
    return manifest


def _owner(adapter: LoraAdapter) -> str:
    return f"{adapter.metadata.namespace}/{adapter.spec.model_ref.name}"


def _model_id(model: InferenceModel) -> str:
    return f"{model.metadata.namespace}/{model.metadata.name}"
