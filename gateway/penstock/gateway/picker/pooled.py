"""The pooled load of a fleet: what the autoscaler asks a gateway, at `/pools`."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from penstock.api.fleet import Fleet, Pool, PoolLoad, PoolsView, Replica, ReplicaLoad
from penstock.api.merged_load import merged
from penstock.gateway.load.reports import ReportStore
from penstock.gateway.models.names import Names
from penstock.gateway.models.outcomes import Outcomes
from penstock.gateway.picker.bookings import Bookings, State
from penstock.gateway.picker.candidates import ReplicaKey
from penstock.gateway.residency.index import ResidencyIndex


class Known(Protocol):
    """What is known of a fleet: a `FleetState`."""

    fleet: Fleet
    version: int
    held: dict[str, int]
    ttft_counts: dict[str, list[int]]
    reports: ReportStore
    bookings: Bookings
    residency: ResidencyIndex
    names: Names
    outcomes: Outcomes

    def replicas(self) -> dict[ReplicaKey, Replica]:
        """All replicas."""
        ...


def pools_view(of: Known, gateway: str, now: float, refused: Mapping[str, str] = {}, ports: Mapping[str, int] = {}) -> PoolsView:
    """The pooled load.

    Args:
        of: What is known of the fleet.
        gateway: The name of this process.
        now: Monotonic seconds.
        refused: Envoy's words on pools whose configuration it refused, by pool.
        ports: Where each InferencePool is served.
    """
    processes: dict[str, list[ReplicaKey]] = {}
    for key, replica in of.replicas().items():
        processes.setdefault(replica.process, []).append(key)
    by_pool: dict[str, list[ReplicaLoad]] = {pool.id: [] for pool in of.fleet.pools}
    for keys in processes.values():
        replica = of.replicas()[keys[0]]
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
        for pool in of.fleet.pools
    ]
    return PoolsView(
        gateway=gateway,
        version=of.version,
        pools=loads,
        conflicts=of.names.conflicts,
        epoch=of.outcomes.epoch,
        models=of.outcomes.view(of.names),
        inference_pools=dict(ports),
    )


def takes_requests(pool: Pool) -> bool:
    """Whether requests go to the pool: not to a prefill pool, which gets no whole ones. A decode pool can prefill too."""
    return pool.role != "Prefill"


def _load(of: Known, keys: Sequence[ReplicaKey], replica: Replica, now: float) -> ReplicaLoad:
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
