"""What the autoscaler knows of a pool: the `/pools` views of all gateway processes, pooled. Pure."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from penstock.api.fleet import PoolsView, ReplicaLoad
from penstock.api.load_report import LoadReport


@dataclass(frozen=True)
class ReplicaSignal:
    """One replica, as the best informed gateway sees it."""

    uid: str
    ready: bool
    cordoned: bool
    in_flight: int
    """Requests that the gateways sent there and that have not ended."""
    report: LoadReport | None
    report_age_s: float | None
    resident_blocks: int = 0
    """Blocks that it is known to cache."""


@dataclass(frozen=True)
class PoolSignals:
    """One pool, from all gateways together."""

    held: int
    """Requests that wait at the gateways for a replica."""
    replicas: tuple[ReplicaSignal, ...]
    ttft_counts: tuple[int, ...] = ()
    """First tokens by the time that they took, since the best informed gateway began; see `LATENCY_EDGES_S`."""
    complete: bool = True
    """False: no gateway answered, and replicas were asked themselves; what is held and in flight is unknown."""


def pool_signals(views: Iterable[PoolsView], pool_id: str) -> PoolSignals | None:
    """The pool as the gateways see it together; None where no gateway knows it, which is not the same as an empty pool.

    Of several reports of one replica the newest counts (a newer epoch, then a higher sequence number); held requests and
    requests in flight add up, since each gateway process knows its own.
    """
    pools = [pool for view in views for pool in view.pools if pool.id == pool_id]
    if not pools:
        return None
    seen: dict[tuple[str, int], list[ReplicaLoad]] = {}
    for pool in pools:
        for replica in pool.replicas:
            seen.setdefault((replica.uid, replica.port), []).append(replica)
    return PoolSignals(
        held=sum(pool.held for pool in pools),
        replicas=tuple(_merge(seen[key]) for key in sorted(seen)),
        # All gateways hear of all first tokens: the one that has listened for longest counts.
        ttft_counts=tuple(max((pool.ttft_counts for pool in pools), key=sum)),
    )


def _merge(sightings: Sequence[ReplicaLoad]) -> ReplicaSignal:
    reports = [(s.report, s.report_age_s) for s in sightings if s.report is not None]
    report, age = max(reports, key=lambda pair: (pair[0].epoch, pair[0].seq), default=(None, None))
    return ReplicaSignal(
        uid=sightings[0].uid,
        ready=any(s.ready for s in sightings),
        cordoned=any(s.cordoned for s in sightings),
        in_flight=sum(s.in_flight for s in sightings),
        report=report,
        report_age_s=age,
        resident_blocks=max(s.resident_blocks for s in sightings),
    )


def choose_victims(signals: PoolSignals, ready: Set[str], replicas: int) -> list[str]:
    """Choose the replicas to remove when a pool shrinks to `replicas`: first those that gateways do not report as ready, then
    those
    already marked as victims, then the least in flight, the least KV in use, the least cached. Ties go by UID.

    Args:
        ready: UIDs of the ready replicas that are not ending. Replicas that are not ready are removed first and need no mark.
    """

    def loss(replica: ReplicaSignal) -> tuple[bool, bool, int, float, int, str]:
        used = replica.report.kv_cache_usage_perc if replica.report else 0.0
        return (replica.ready, not replica.cordoned, replica.in_flight, used, replica.resident_blocks, replica.uid)

    candidates = sorted((replica for replica in signals.replicas if replica.uid in ready), key=loss)
    return [replica.uid for replica in candidates[: max(len(ready) - replicas, 0)]]
