"""Who may be picked at all, and what is known of each."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

import msgspec

from penstock.api.fleet import Replica
from penstock.api.load_report import LoadReport
from penstock.gateway.picker.subset import Subset


class ReplicaKey(NamedTuple):
    """What a replica is known by: never its address, which may be given out again."""

    uid: str
    port: int


def key_of(replica: Replica) -> ReplicaKey:
    """The key of a replica of the fleet."""
    return ReplicaKey(replica.uid, replica.port)


class Booked(msgspec.Struct, frozen=True):
    """Work sent to a replica that its load report does not hold yet."""

    requests: int = 0
    prefill_tokens: int = 0


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One replica that may be picked, at the moment of a pick."""

    key: ReplicaKey
    name: str
    pool: str
    endpoint: str
    report: LoadReport | None = None
    """The newest report; None where nothing was heard, which is never read as no load."""
    report_age_s: float = 0.0
    """Seconds since `report` was received or confirmed; without meaning where there is none."""
    booked: Booked = Booked()
    resident_tokens: int = 0
    """Prompt tokens that the replica's prefix cache would supply."""
    suspect: bool = False
    """A recent request that was sent there was answered by another replica: a last resort."""


class Rejected(msgspec.Struct, frozen=True):
    """A replica that may not be picked, and why."""

    name: str
    why: str


def why_not(replica: Replica, subset: Subset | None, excluded: Collection[ReplicaKey]) -> str | None:
    """Why `replica` must not be picked; None where it may be."""
    if not replica.ready:
        return "not ready"
    if replica.terminating:
        return "terminating"
    if replica.cordoned:
        return "cordoned"
    if excluded and key_of(replica) in excluded:
        return "excluded"
    if subset is not None and not subset.allows(replica):
        return "outside the gateway's subset"
    return None


def eligible(
    replicas: Iterable[Replica], *, subset: Subset | None = None, excluded: Collection[ReplicaKey] = ()
) -> tuple[list[Replica], list[Rejected]]:
    """Splits `replicas` into those that may be picked and the others with reasons.

    Args:
        replicas: All replicas of the model's pools.
        subset: The gateway's restriction; None where it made none.
        excluded: Replicas that this request must not go to.
    """
    allowed: list[Replica] = []
    rejected: list[Rejected] = []
    for replica in replicas:
        why = why_not(replica, subset, excluded)
        if why is None:
            allowed.append(replica)
        else:
            rejected.append(Rejected(replica.name, why))
    return allowed, rejected
