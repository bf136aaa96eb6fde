"""Rules about a fleet that hold wherever it comes from."""

from collections import Counter
from collections.abc import Iterable
from ipaddress import ip_address

import msgspec

from penstock.api.fleet import Fleet, Model


def oldest_claims(models: Iterable[Model]) -> list[Model]:
    """The models in order of id, each with only the served names that no older model claims; a loser may keep none."""
    winners: dict[str, str] = {}
    for model in sorted(models, key=lambda model: (model.created, model.id), reverse=True):
        winners.update(dict.fromkeys(model.served_names, model.id))  # the oldest comes last and overwrites
    return [
        msgspec.structs.replace(model, served_names=[name for name in model.served_names if winners[name] == model.id])
        for model in sorted(models, key=lambda model: model.id)
    ]


def check(fleet: Fleet) -> None:
    """Raises ValueError that names what is wrong: something twice, a reference to nothing, or a host that is no address."""
    models = _unique("models", (model.id for model in fleet.models))
    pools = _unique("pools", (pool.id for pool in fleet.pools))
    _unique("replicas", (f"{replica.uid}:{replica.port}" for replica in fleet.replicas))
    for pool in fleet.pools:
        if pool.model not in models:
            raise ValueError(f"pools: {pool.id!r} is of model {pool.model!r}, which is not among models")
    for replica in fleet.replicas:
        if replica.pool not in pools:
            raise ValueError(f"replicas: {replica.name!r} is in pool {replica.pool!r}, which is not among pools")
        try:
            ip_address(replica.host)
        except ValueError:  # Envoy would refuse the endpoints of all pools for its sake
            raise ValueError(f"replicas: {replica.name!r} has host {replica.host!r}, which is not an IP address") from None


def _unique(field: str, keys: Iterable[str]) -> set[str]:
    counts = Counter(keys)
    for key, count in counts.items():
        if count > 1:
            raise ValueError(f"{field}: {key!r} occurs {count} times")
    return set(counts)
