"""What must hold of a fleet, wherever it comes from."""

from collections import Counter
from collections.abc import Iterable
from ipaddress import ip_address

from penstock.api.fleet import Fleet


def check(fleet: Fleet) -> None:
    """Raises ValueError that names what is wrong: something twice, a reference to nothing, or a host that is no address."""
    models = _unique("models", (model.id for model in fleet.models))
    pools = _unique("pools", (pool.id for pool in fleet.pools))
    _unique("replicas", (replica.id for replica in fleet.replicas))
    for pool in fleet.pools:
        if pool.model not in models:
            raise ValueError(f"pools: {pool.id!r} is of model {pool.model!r}, which is not among models")
    for adapter in fleet.adapters:
        if not adapter.served_names:
            raise ValueError(f"adapters: {adapter.id!r} has no served_names")
    _unique("adapters", (adapter.id for adapter in fleet.adapters))
    members = {replica.id for replica in fleet.replicas}
    _unique("inference_pools", (pool.id for pool in fleet.inference_pools))
    for pool in fleet.inference_pools:
        for what, named, there in (("models", pool.models, models), ("members", pool.members, members)):
            if strange := [name for name in named if name not in there]:
                raise ValueError(f"inference_pools: {pool.id!r} names {what} that do not exist: {', '.join(strange)}")
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
