"""Pages that are lent to other replicas, as the scheduler of the lender sees them.

A lease pins slots of the host's memory, never blocks of the KV cache. It is granted when its pages are written, and ends when its
reader releases it, when its time is up or when a page is forgotten.
"""

import logging
import uuid
from collections import Counter
from collections.abc import Sequence

import msgspec

from penstock.engine.connectors.tier_index import Key, TierIndex
from penstock.engine.connectors.transfer.words import Errand, Page

_log = logging.getLogger(__name__)


class _Lease(msgspec.Struct):
    slots: dict[Key, int]
    until: float = 0.0
    """Unix time in seconds; 0: not granted yet."""


class Leases:
    """All leases of one replica.

    Args:
        host: The pages.
        seconds: That a lease lasts without a word from its reader.
    """

    def __init__(self, host: TierIndex, seconds: float) -> None:
        self._host = host
        self._seconds = seconds
        self._leases: dict[str, _Lease] = {}
        self._releases = Counter[str]()
        self._due: list[Errand] = []
        self._revoked: list[int] = []
        """Slots whose ranks must hear that they are lent no longer."""
        self._told: list[int] = []
        """Slots whose ranks have been told so, when `take` is called again."""
        self.num_expired = 0

    @property
    def num_leases(self) -> int:
        """Leases that are held."""
        return len(self._leases)

    @property
    def num_pages(self) -> int:
        """Pages that they hold, a page once for each lease."""
        return sum(len(lease.slots) for lease in self._leases.values())

    @property
    def is_due(self) -> bool:
        """Whether ranks must be told something soon."""
        return bool(self._due or self._told) or any(not lease.until for lease in self._leases.values())

    def hold(self, keys: Sequence[Key]) -> tuple[str, list[int]]:
        """Lends pages that are there or being written; returns the lease and their slots."""
        slots = {key: self._host.place(key) for key in keys}
        self._host.pin(slots.values())
        lease = uuid.uuid4().hex
        self._leases[lease] = _Lease(slots)
        return lease, list(slots.values())

    def take(self, now: float) -> list[Errand]:
        """What the ranks must hear now; `now` is Unix time in seconds.

        The errands of one call must have been carried out before the next call: slots of revoked leases are free from then on.
        """
        self._host.unpin(self._told)
        for name, lease in list(self._leases.items()):
            if not all(self._host.is_at(key, slot) for key, slot in lease.slots.items()):
                self._end(name)
            elif lease.until and now >= lease.until:
                self.num_expired += 1
                _log.warning("nobody has fetched the %d KV pages of lease %s in time", len(lease.slots), name)
                self._end(name)
            elif not lease.until and all(key in self._host for key in lease.slots):
                lease.until = now + self._seconds
                pages = [Page(key.group, key.block_hash, slot) for key, slot in lease.slots.items()]
                self._due.append(Errand("grant", name, pages=pages))
        self._told, self._revoked = self._revoked, []
        due, self._due = self._due, []
        return due

    def released(self, name: str, readers: int) -> None:
        """One of the reader's ranks needs a lease no longer, which has so many such words to come in all."""
        if name in self._leases:
            self._releases[name] += 1
            if self._releases[name] >= readers:
                self._end(name)

    def renewed(self, name: str, now: float) -> None:
        """The reader of a lease still waits."""
        if (lease := self._leases.get(name)) is not None and lease.until:
            lease.until = now + self._seconds

    def clear(self) -> None:
        """Ends all leases."""
        for name in list(self._leases):
            self._end(name)

    def _end(self, name: str) -> None:
        lease = self._leases.pop(name)
        self._releases.pop(name, None)
        self._due.append(Errand("revoke", name))
        self._revoked += lease.slots.values()
