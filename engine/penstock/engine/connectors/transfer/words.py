"""What the scheduler asks of a rank about pages at other replicas, and what it hears back."""

from typing import Literal

import msgspec


class Page(msgspec.Struct, frozen=True, array_like=True):
    """A page by name, and its slot in this rank's host memory."""

    group: int
    block_hash: bytes
    slot: int


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """Another replica."""

    engine_id: str
    """Drawn at each start, so a restarted replica is another one."""
    hosts: tuple[str, ...]
    """By part of pages: its ranks may be on several nodes."""
    port: int
    """Port of the first part of pages; part p has the p-th port after it."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """The part of pages that a rank has. Ranks with the same pages have the same part."""

    number: int
    """Counted through all pipeline stages."""
    name: str
    """Stands for all that decides about its bytes."""
    host: str
    """Where the rank lends it."""


class Errand(msgspec.Struct, frozen=True, array_like=True):
    """One thing to do for one lease."""

    action: Literal["grant", "revoke", "pull", "release", "renew"]
    """The lender's rank grants and revokes; the reader's rank pulls, releases and renews."""
    lease: str
    number: int = 0
    """Number by which the end of a pull is reported."""
    pages: list[Page] = []
    peer: Peer | None = None
    """The lender; None: this replica."""
    readers: int = 1
    """Ranks of the reader that need the lease: it ends when all of them have released it."""


class Pulled(msgspec.Struct, frozen=True, array_like=True):
    """How a pull has ended on one rank."""

    seconds: float
    got: list[int]
    """Places of the pages that have come, in the errand's list."""
    error: str | None = None
    """Why others have not."""


class News(msgspec.Struct, frozen=True, array_like=True):
    """What has happened on one rank since it was last asked."""

    pulled: dict[int, Pulled]
    released: list[tuple[str, int]]
    """Leases that a rank of the reader needs no longer, each with the number of its ranks that need it at first."""
    renewed: list[str]
    """Leases whose reader still waits."""
