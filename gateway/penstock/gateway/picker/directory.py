"""What discovery says of the fleet: models by name, replicas by key, by address and by model."""

from typing import NamedTuple

import msgspec

from penstock.api.fleet import Fleet, InferencePool, Model, Pool, Replica
from penstock.gateway.models.names import Names
from penstock.gateway.picker.candidates import ReplicaKey, key_of
from penstock.gateway.picker.subset import spelled


class Change(NamedTuple):
    """What an update has changed."""

    gone: list[ReplicaKey]
    fallen: list[ReplicaKey]
    """Replicas that were ready: a process may have ended, whose place another takes under the same key."""
    replicas_differ: bool


class Directory:
    """The fleet, as `update` has seen it last."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.names = Names(self.fleet)
        """Owners of names."""
        self.replicas: dict[ReplicaKey, Replica] = {}
        """All replicas."""
        self.answering: dict[str, list[Replica]] = {}
        """By model id, the replicas that requests may go to, ready or not."""
        self.prefilling: dict[str, list[Replica]] = {}
        """By model id, those of Prefill pools."""
        self._by_endpoint: dict[str, ReplicaKey] = {}
        self._inference_pools: dict[str, InferencePool] = {}

    def update(self, fleet: Fleet) -> Change | None:
        """Takes in what discovery sees now; None: nothing has changed but what the autoscaler says."""
        if msgspec.structs.replace(fleet, scaling=self.fleet.scaling) == self.fleet:
            self.fleet = fleet
            return None
        old, self.fleet = self.replicas, fleet
        self.replicas = replicas = {key_of(replica): replica for replica in fleet.replicas}
        # A terminating replica's address may have been given to a new one already: the new one owns it.
        order = sorted(replicas.items(), key=lambda item: not item[1].terminating)
        self._by_endpoint = {spelled(replica.endpoint): key._replace(rank=None) for key, replica in order}
        self.names = Names(fleet)
        self._inference_pools = {pool.id: pool for pool in fleet.inference_pools}
        pools = {pool.id: pool for pool in fleet.pools}
        self.answering, self.prefilling = {}, {}
        for replica in fleet.replicas:
            if (pool := pools.get(replica.pool)) is not None:
                (self.answering if takes_requests(pool) else self.prefilling).setdefault(pool.model, []).append(replica)
        gone = [key for key in old if key not in replicas]
        fallen = [key for key, before in old.items() if before.ready and key in replicas and not replicas[key].ready]
        return Change(gone, fallen, replicas != old)

    def inference_pool(self, pool: str) -> InferencePool | None:
        """An InferencePool by its id."""
        return self._inference_pools.get(pool)

    def replicas_of(self, model: Model) -> list[Replica]:
        """The replicas that requests for `model` may go to, ready or not."""
        return self.answering.get(model.id, [])

    def names_at(self, replica: Replica) -> list[str]:
        """What the model that `replica` serves is called."""
        models = {pool.model for pool in self.fleet.pools if pool.id == replica.pool}
        return [name for model in self.fleet.models if model.id in models for name in (*model.served_names, model.id)]

    def tells(self, key: ReplicaKey) -> bool:
        """Whether `key` says by events what it caches."""
        replica = self.replicas.get(key)
        return replica is not None and replica.events_port != 0

    def address_of(self, key: ReplicaKey) -> str:
        """Where `key` is, if it is the only one there: `key_at` finds it by that. Empty if it is one of several."""
        replica = self.replicas.get(key)
        alone = replica is not None and key.rank is None and self.key_at(replica.endpoint) == key
        return replica.endpoint if replica is not None and alone else ""

    def key_at(self, endpoint: str, rank: int | None = None) -> ReplicaKey | None:
        """The replica at an `ip:port`, however the address is written.

        Args:
            endpoint: The address.
            rank: The data-parallel rank that is meant, where the replica there is one of several.
        """
        whole = self._by_endpoint.get(endpoint) or self._by_endpoint.get(spelled(endpoint))
        if whole is None or whole in self.replicas:
            return whole
        key = whole._replace(rank=rank)
        return key if key in self.replicas else None


def takes_requests(pool: Pool) -> bool:
    """Whether requests go to the pool: not to a prefill pool, which gets no whole ones. A decode pool can prefill too."""
    return pool.role != "Prefill"
