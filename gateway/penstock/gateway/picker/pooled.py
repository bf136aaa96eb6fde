"""The pooled load of a fleet: what the autoscaler asks a gateway, at `/pools`."""

from collections.abc import Mapping, Sequence

from penstock.api.fleet import PoolLoad, PoolsView, Replica, ReplicaLoad
from penstock.api.merged_load import merged
from penstock.gateway.picker.bookings import State
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.picker.directory import takes_requests
from penstock.gateway.picker.state import FleetState


def pools_view(
    of: FleetState, gateway: str, now: float, refused: Mapping[str, str] = {}, ports: Mapping[str, int] = {}
) -> PoolsView:
    """The pooled load.

    Args:
        of: What is known of the fleet.
        gateway: The name of this process.
        now: Monotonic seconds.
        refused: Envoy's words on pools whose configuration it refused, by pool.
        ports: Where each InferencePool is served.
    """
    processes: dict[str, list[ReplicaKey]] = {}
    for key, replica in of.directory.replicas.items():
        processes.setdefault(replica.process, []).append(key)
    by_pool: dict[str, list[ReplicaLoad]] = {pool.id: [] for pool in of.directory.fleet.pools}
    for keys in processes.values():
        replica = of.directory.replicas[keys[0]]
        if replica.pool in by_pool:
            by_pool[replica.pool].append(_load(of, keys, replica, now))
    held = dict(of.held)  # by model: its first pool shows them
    loads = [
        PoolLoad(
            id=pool.id,
            model=pool.model,
            held=held.pop(pool.model, 0) if takes_requests(pool) else 0,
            replicas=by_pool[pool.id],
            refused=refused.get(pool.id),
            ttft_counts=list(of.ttft_counts.get(pool.id, ())),
        )
        for pool in of.directory.fleet.pools
    ]
    return PoolsView(
        gateway=gateway,
        version=of.version,
        pools=loads,
        conflicts=of.directory.names.conflicts,
        epoch=of.outcomes.epoch,
        models=of.outcomes.view(of.directory.names),
        inference_pools=dict(ports),
    )


def _load(of: FleetState, keys: Sequence[ReplicaKey], replica: Replica, now: float) -> ReplicaLoad:
    """The load of a process: `keys` are its ranks. It is scaled as a whole, so nothing is known until each has been heard."""
    heard = [it for it in map(of.reports.get, keys) if it is not None]
    complete = len(heard) == len(keys)
    return ReplicaLoad(
        uid=replica.uid,
        name=replica.name,
        port=replica.port,
        ready=replica.ready and not replica.terminating,
        cordoned=replica.cordoned,
        report=merged([it.report for it in heard]) if complete else None,
        report_age_s=now - min(it.at for it in heard) if complete else None,
        pending=sum(of.bookings.count(key, State.PENDING) for key in keys),
        in_flight=sum(of.bookings.count(key) for key in keys),
        resident_blocks=sum(of.residency.blocks(key) for key in keys),
    )
