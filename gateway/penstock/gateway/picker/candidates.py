"""The replicas that may be picked, and the figures known of each."""

from collections.abc import Collection
from typing import NamedTuple

import msgspec

from penstock.api.fleet import Replica
from penstock.gateway.picker.subset import Subset


class ReplicaKey(NamedTuple):
    """What a replica is known by: never its address, which may be given out again."""

    uid: str
    port: int
    rank: int | None = None


def key_of(replica: Replica) -> ReplicaKey:
    """The key of a replica of the fleet."""
    return ReplicaKey(replica.uid, replica.port, replica.rank)


class Booked(msgspec.Struct, frozen=True):
    """Work sent to a replica that its load report does not hold yet."""

    requests: int = 0
    prefill_tokens: int = 0
    transfer_tokens: int = 0
    """Tokens whose KV blocks come from a prefill replica."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One replica that could be picked, as it was at the moment of a pick; made for people, out of `Columns`."""

    key: ReplicaKey
    name: str
    pool: str
    endpoint: str
    report_age_s: float | None
    """Seconds since the newest report was received or confirmed; None where nothing was heard, which is never no load."""
    running: int
    waiting: int
    booked: Booked
    resident_tokens: int
    """Prompt tokens that the replica's prefix cache would supply."""
    last_resort: bool
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
