"""Pages of other replicas that requests wait for, as the scheduler of the reader sees them."""

import logging
from collections.abc import Sequence

import msgspec

from penstock.engine.cache.pages import overlapping
from penstock.engine.connectors.load_costs import TierLoads
from penstock.engine.connectors.tier_index import Key, TierIndex
from penstock.engine.connectors.transfer.words import Errand, Page, Part, Peer, Pulled
from penstock.engine.messages import RemotePrefix

PATIENCE_S = 12.0
"""That a request waits for its pages; a rank gives up before."""
RENEW_S = 5.0
"""Between two words to the lender of a request that waits for its turn."""

_log = logging.getLogger(__name__)


class _Pull(msgspec.Struct):
    """Pages that are on their way."""

    index: int
    keys: list[Key]
    slots: list[int]
    began: float
    """Unix time in seconds."""
    heard: list[Pulled] = []


class Pulls:
    """All pulls of one replica.

    Args:
        host: Where pages go.
        page_bytes: Of a page, on each rank.
        ranks: Each of which reads its part.
    """

    def __init__(self, host: TierIndex, page_bytes: int, ranks: int) -> None:
        self._host = host
        self._page_bytes, self._ranks = page_bytes, ranks
        self._waiting: dict[int, RemotePrefix] = {}
        self._under: dict[int, _Pull] = {}
        self._over: list[int] = []
        self._due: list[Errand] = []
        self._renewed_at = 0.0
        self._number = 0
        self.parts: Sequence[Part] = ()
        """What each rank that reads has of a page; set when the weights are known."""
        self.times = TierLoads()
        """Of pulls that brought all pages, from the decision to fetch them."""
        self.num_pulls = self.num_failed_pages = self.num_bytes = 0
        self.seconds = 0.0

    @property
    def is_moving(self) -> bool:
        """Whether pages are on their way, or ranks must be told something soon."""
        return bool(self._under or self._due or self._over)

    def arrived(self, index: int, remote: RemotePrefix) -> None:
        """A request has come whose pages are at another replica."""
        self._waiting[index] = remote

    def remote(self, index: int) -> RemotePrefix | None:
        """Where the pages of a request are, as long as nobody has fetched them."""
        return self._waiting.get(index)

    def left(self, index: int) -> None:
        """The request needs nothing of another replica any more."""
        if (remote := self._waiting.pop(index, None)) is not None:
            self._due.append(Errand("release", remote.lease, peer=_peer(remote), readers=self._readers(remote)))

    def begin(self, index: int, keys: Sequence[Key], now: float) -> bool:
        """Begins to read what the host's memory lacks of these pages; False: nothing is on its way, and the lease is released."""
        remote, taken = self._waiting[index], list[tuple[Key, int]]()
        for key in keys:
            if key not in self._host and (slot := self._host.reserve(key)) is not None:
                taken.append((key, slot))
        if not taken:
            self.left(index)
            return False
        del self._waiting[index]
        self._number += 1
        self.num_pulls += 1
        keys, slots = [key for key, _ in taken], [slot for _, slot in taken]
        self._under[self._number] = _Pull(index, keys, slots, now)
        pages = [Page(key.group, key.block_hash, slot) for key, slot in taken]
        self._due.append(Errand("pull", remote.lease, self._number, pages, _peer(remote), self._readers(remote)))
        return True

    def take(self, now: float) -> list[Errand]:
        """What the ranks must do now; `now` is Unix time in seconds."""
        if now - self._renewed_at >= RENEW_S or now < self._renewed_at:
            self._renewed_at = now
            self._due += [Errand("renew", remote.lease, peer=_peer(remote)) for remote in self._waiting.values()]
        due, self._due = self._due, []
        return due

    def pulled(self, number: int, how: Pulled, now: float) -> None:
        """One rank has ended a pull."""
        pull = self._under[number]
        pull.heard.append(how)
        if len(pull.heard) < self._ranks:
            return
        del self._under[number]
        got = set(pull.heard[0].got).intersection(*(it.got for it in pull.heard[1:]))
        for at, (key, slot) in enumerate(zip(pull.keys, pull.slots, strict=True)):
            self._host.written(key, slot, ok=at in got)
        self.seconds += max(it.seconds for it in pull.heard)
        self.num_bytes += len(got) * self._page_bytes
        self.num_failed_pages += len(pull.keys) - len(got)
        if len(got) == len(pull.keys):
            self.times.observe(len(got), now - pull.began, now)
        error = next((it.error for it in pull.heard if it.error is not None), None)
        if error is not None:
            _log.warning("%d KV pages of another replica have not come, and are computed: %s", len(pull.keys) - len(got), error)
        if pull.index >= 0:
            self._over.append(pull.index)

    def _readers(self, remote: RemotePrefix) -> int:
        """How often ranks here read a part there."""
        return sum(len(lenders(part, len(remote.hosts))) for part in self.parts)

    def take_waits(self, now: float) -> list[int]:
        """Requests that need wait no longer: their pages are there, or do not come."""
        for pull in self._under.values():
            if pull.index >= 0 and now >= pull.began + PATIENCE_S:
                self._over.append(pull.index)
                pull.index = -1
        over, self._over = self._over, []
        return over


def lenders(part: Part, others: int) -> range:
    """The parts of another replica, counted through all of its stages, that have what a rank here needs of a page.

    Args:
        part: The rank's.
        others: Parts of the other replica, which has as many stages.
    """
    of = others // part.stages
    found = overlapping(part.number, part.of, of)
    return range(part.stage * of + found.start, part.stage * of + found.stop)


def _peer(remote: RemotePrefix) -> Peer:
    return Peer(remote.engine_id, tuple(remote.hosts), remote.port)
