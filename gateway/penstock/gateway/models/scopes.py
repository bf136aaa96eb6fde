"""What an InferencePool holds, computed once a fleet: each request that comes by its port asks."""

from typing import NamedTuple

from penstock.api.fleet import Fleet, InferencePool, Model, Replica
from penstock.gateway.picker.candidates import ReplicaKey, key_of
from penstock.gateway.picker.state import FleetState
from penstock.gateway.picker.subset import Subset, only


class Scope(NamedTuple):
    """One InferencePool."""

    members: list[Replica]
    keys: list[ReplicaKey]
    """The replicas of `members`."""
    open_models: list[Model]
    """The models without an InferenceModel among its own: one or none."""
    narrowed: dict[str, Subset | None]
    """By model id, the model's replicas in the pool. None if those are all that it has."""


class Scopes:
    """The scopes of a fleet's pools."""

    def __init__(self, state: FleetState) -> None:
        self._state = state
        self._fleet: Fleet | None = None
        self._scopes: dict[str, Scope] = {}

    def of(self, pool: InferencePool) -> Scope:
        """The scope of `pool`."""
        if self._fleet is not self._state.directory.fleet:
            self._fleet, self._scopes = self._state.directory.fleet, {}
        scope = self._scopes.get(pool.id)
        if scope is None:
            scope = self._scopes[pool.id] = self._scope(pool)
        return scope

    def _scope(self, pool: InferencePool) -> Scope:
        ids = frozenset(pool.members)
        members = [replica for replica in self._state.directory.replicas.values() if replica.id in ids]
        models = [model for model in self._state.directory.fleet.models if model.id in pool.models]
        narrowed: dict[str, Subset | None] = {}
        for model in models:
            replicas = self._state.directory.replicas_of(model)
            inside = [replica for replica in replicas if replica.id in ids]
            narrowed[model.id] = None if len(inside) == len(replicas) else only(inside, None)
        return Scope(members, [key_of(it) for it in members], [model for model in models if model.open], narrowed)
