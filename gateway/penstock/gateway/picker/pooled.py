"""The pooled load of a fleet: what the autoscaler asks a gateway, at `/pools`."""

from collections.abc import Mapping
from typing import Protocol

from penstock.api.fleet import Fleet, Pool, PoolLoad, PoolsView, Replica, ReplicaLoad
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
    by_pool: dict[str, list[ReplicaLoad]] = {pool.id: [] for pool in of.fleet.pools}
    for key, replica in of.replicas().items():
        if replica.pool in by_pool:
            by_pool[replica.pool].append(_load(of, key, replica, now))
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


def _load(of: Known, key: ReplicaKey, replica: Replica, now: float) -> ReplicaLoad:
    heard = of.reports.get(key)
    return ReplicaLoad(
        uid=replica.uid,
        name=replica.name,
        port=replica.port,
        ready=replica.ready and not replica.terminating,
        cordoned=replica.cordoned,
        report=heard.report if heard else None,
        report_age_s=now - heard.at if heard else None,
        pending=of.bookings.count(key, State.PENDING),
        in_flight=of.bookings.count(key),
        resident_blocks=of.residency.blocks(key),
    )
