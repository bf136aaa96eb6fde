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
    """By part of pages, counted through all pipeline stages: its ranks may be on several nodes."""
    port: int
    """Port of the first part of pages; part p has the p-th port after it."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """The part of pages that a rank has. Ranks with the same pages have the same part."""

    stage: int
    stages: int
    """Of the rank's pipeline."""
    number: int
    """Among those of its stage."""
    of: int
    """How many these are."""
    name: str
    """Stands for all that decides about the bytes of whole pages."""
    host: str
    """Where the rank lends it."""
    keeps: bool
    """Whether the rank reads it for itself: of those on a node with the same part one does."""


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
    """How often the reader releases the lease: each of its ranks to each rank from which it reads. Then it ends."""


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
    """Leases that a rank of the reader needs no longer, each with the number of such words that end it."""
    renewed: list[str]
    """Leases whose reader still waits."""
