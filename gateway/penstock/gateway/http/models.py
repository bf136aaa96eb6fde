"""`/debug/models`: which model is served under which name and port."""

from collections.abc import Mapping

import msgspec

from penstock.api.fleet import InferencePool, NameConflict
from penstock.gateway.picker.state import FleetState


class NameView(msgspec.Struct, frozen=True, kw_only=True):
    """What a name stands for."""

    model: str
    """`Model.id`."""
    adapter: str | None
    """`Adapter.id`."""


class CanaryView(msgspec.Struct, frozen=True, kw_only=True):
    """A share of traffic."""

    model: str
    of: str
    weight: float
    idle: str | None
    """Why it gets nothing; None where it gets its share, whenever it has a ready replica."""


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """An InferencePool."""

    pool: InferencePool
    port: int | None
    """Port of the picker for this pool. None: none, see the log."""


class ModelsView(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `GET /debug/models`."""

    names: dict[str, NameView]
    conflicts: list[NameConflict]
    unserved_adapters: list[str]
    """Adapters whose model does not exist."""
    canaries: list[CanaryView]
    inference_pools: list[PoolView]
    scaling: dict[str, str]
    """The autoscaler's last word on each pool that it sizes, by `Pool.id`."""


def models_view(state: FleetState, ports: Mapping[str, int]) -> ModelsView:
    """Return the view of the present fleet.

    Args:
        state: The fleet.
        ports: Ports of InferencePools, by id.
    """
    names = state.directory.names
    return ModelsView(
        names={
            name: NameView(model=named.model.id, adapter=named.adapter.id if named.adapter is not None else None)
            for name, named in sorted(names.items())
        },
        conflicts=names.conflicts,
        unserved_adapters=[adapter.id for adapter in names.orphans],
        canaries=[
            CanaryView(model=it.id, of=it.canary.of, weight=it.canary.weight, idle=names.idle_canaries.get(it.id))
            for it in state.directory.fleet.models
            if it.canary is not None
        ],
        inference_pools=[PoolView(pool=pool, port=ports.get(pool.id)) for pool in state.directory.fleet.inference_pools],
        scaling=state.directory.fleet.scaling,
    )
