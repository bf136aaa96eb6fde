"""What `penstock up` tells other commands of its models, at `/models`: the InferenceModel as a cluster would have it, and its
pools."""

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.api.resources import InferenceModel
from penstock.operator.autoscale.coldstart import Starting
from penstock.operator.command_line import CommandFailed


class ToldPool(msgspec.Struct, frozen=True, kw_only=True):
    """One pool's replicas."""

    replicas: int
    """How many there are to be."""
    starting: list[tuple[float, bool]]
    """The age in seconds of each replica that is not ready, and whether it cannot start."""

    @property
    def size(self) -> tuple[int, tuple[Starting, ...]]:
        """The same as the autoscaler takes it."""
        return self.replicas, tuple(Starting(age, failing) for age, failing in self.starting)


class ToldModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model."""

    resource: dict[str, Any]
    """The InferenceModel, with `status.scaling`."""
    pools: dict[str, ToldPool]
    """Pools by name."""


def named(models: Sequence[ToldModel], name: str) -> ToldModel:
    """The model with this name or served name; raises `CommandFailed` where there is not exactly one."""
    found = [it for it in models if name in _names(InferenceModel.parse(it.resource))]
    if len(found) == 1:
        return found[0]
    ids = ", ".join(sorted(f"{it.resource['metadata']['namespace']}/{it.resource['metadata']['name']}" for it in found or models))
    raise CommandFailed(f"{name} names several models: {ids}" if found else f"there is no model {name} here; there is {ids}")


def _names(model: InferenceModel) -> list[str]:
    return [model.metadata.name, *model.served_names]
