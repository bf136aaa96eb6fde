"""Pages on a disk, in a shared store or in an object store, as the scheduler sees them: copies of what the host's memory holds.

Every page that comes to the host's memory is written there, too, as long as it is still in memory when its turn comes. A request
whose prefix goes on there is parked while the pages are read into the host's memory; it then loads them from there. A
shared store is asked for each request what it has of it.
"""

import logging
from collections.abc import Callable, Iterable, Sequence

import msgspec

from penstock.engine.connectors.eviction import PolicyName
from penstock.engine.connectors.load_costs import TierLoads
from penstock.engine.connectors.lookups import SHUT_S, SLOW_S, LookUps
from penstock.engine.connectors.moves import Lower, Move, Moved, PageFile
from penstock.engine.connectors.tier_index import Key, TierIndex
from penstock.engine.stats import TierStats

MAX_WRITES = 8
"""Most writes in flight, since a read may have to wait for them."""
PAUSE_S = 30.0
"""Without writes, after one has failed: the disk is full, say."""
PATIENCE_S = 10.0
"""That a request waits for reads; a disk that hangs must not hold it up for ever."""
REFRESH_S = 60.0
"""Between two looks at what other replicas have stored, where they store in one place."""

_WORDS: dict[Lower, str] = {"disk": "disk", "store": "shared store", "object": "object store"}

_log = logging.getLogger(__name__)


class _Under(msgspec.Struct, frozen=True):
    """A move under way."""

    move: Move
    key: Key
    host_slot: int
    disk_slot: int


class _Wait(msgspec.Struct):
    """A request that waits for reads."""

    index: int
    began: float
    pages: int
    keys: set[Key]


class LowerTier:
    """The scheduler's half.

    Args:
        name: Where the pages are.
        host: The tier in front, which all pages pass through.
        num_pages: That fit.
        page_bytes: Of a page.
        loads: Learns what reads take; None: nobody else asks.
        on_change: As in `TierIndex`.
        policy: Which page is evicted.
    """

    def __init__(
        self,
        name: Lower,
        host: TierIndex,
        num_pages: int,
        page_bytes: int,
        loads: TierLoads | None = None,
        on_change: Callable[[Key, bool], None] | None = None,
        policy: PolicyName = "lru",
    ) -> None:
        self.name: Lower = name
        # A shared store evicts by itself: what this replica loses sight of stays there for the others.
        self.index = TierIndex(num_pages, None if name == "store" else self._delete, on_change, policy)
        self._looks = LookUps() if name == "store" else None
        self._host = host
        self._page_bytes = page_bytes
        self._loads = loads or TierLoads()
        self._wanted: dict[Key, None] = {}
        self._due: list[Move] = []
        self._under: dict[int, _Under] = {}
        self._reading: set[Key] = set()
        self._waits: list[_Wait] = []
        self._number = 0
        self._paused_until = 0.0
        self._listed_at: float | None = None
        self._written = self._read = self._failed = self._failed_writes = 0
        self._seconds = {"write": 0.0, "read": 0.0}

    @property
    def is_moving(self) -> bool:
        """True if work is due or in flight whose end is found only by polling."""
        return bool(self._due or self._under or self._wanted)

    def open(self, pages: Iterable[PageFile]) -> None:
        """The folder has been opened with these pages in it, the least recently used first. An object store is looked at later:
        a start does not depend on it."""
        self._listed_at = None
        for page in pages:
            key = Key(page.group, page.block_hash)
            if (slot := self.index.reserve(key)) is not None:
                self.index.written(key, slot, ok=True)

    def offer(self, key: Key) -> None:
        """The host's memory has a page."""
        if key not in self.index:
            self._wanted[key] = None

    def has(self, key: Key) -> bool:
        """Whether the page is in the host's memory, or can be read into it."""
        return key in self._host or key in self.index

    def is_shut(self, now: float) -> bool:
        """Whether it is left alone for a while: it has not answered."""
        return self._looks is not None and self._looks.is_shut(now)

    def look(self, index: int, keys: Iterable[Key], now: float) -> bool:
        """Begins to ask a shared store which of these pages it has, for a request; False: there is nothing to ask."""
        if self._looks is None or self._looks.is_shut(now) or not (asked := [key for key in keys if key not in self._host]):
            return False
        self._number += 1
        move = Move(self._number, "find", pages=[PageFile(*key) for key in asked])
        self._under[self._number] = _Under(move, Key(0, b""), -1, -1)
        self._due.append(move)
        self._looks.asked(self._number, index, asked, now)
        return True

    def begin(self, index: int, keys: Sequence[Key], now: float) -> bool:
        """Begins to read what the host's memory lacks of these pages, for a request; False: nothing is on its way."""
        coming: set[Key] = set()
        for key in keys:
            if key in self._host:
                continue
            if key not in self._reading and not self._begin_read(key):
                break
            coming.add(key)
        if not coming:
            return False
        self.index.touch(keys)
        self._waits.append(_Wait(index, now, len(coming), coming))
        return True

    def _begin_read(self, key: Key) -> bool:
        if key not in self.index or (host_slot := self._host.reserve(key)) is None:
            return False
        disk_slot = self.index.slot(key)
        self.index.pin([disk_slot])
        self._reading.add(key)
        self._begin("read", key, host_slot, disk_slot)
        return True

    def _begin(self, action: str, key: Key, host_slot: int, disk_slot: int) -> None:
        self._number += 1
        move = msgspec.convert((self._number, action, key.group, key.block_hash, host_slot), Move)
        self._under[self._number] = _Under(move, key, host_slot, disk_slot)
        self._due.append(move)

    def _delete(self, key: Key) -> None:
        self._begin("delete", key, -1, -1)

    def forget(self, key: Key) -> None:
        """This content must not be found any more, now or by another process."""
        self._wanted.pop(key, None)
        if self.index.knows(key):
            self.index.forget(key)
            self._delete(key)

    def clear(self) -> None:
        """Forget all content."""
        self._wanted.clear()
        for key in self.index.known():
            self.index.forget(key)
            self._delete(key)

    def take(self, now: float) -> list[Move]:
        """What the ranks must begin now; `now` is Unix time in seconds."""
        if now >= self._paused_until:
            writes = sum(under.move.action == "write" for under in self._under.values())
            while self._wanted and writes < MAX_WRITES:
                key = next(iter(self._wanted))
                del self._wanted[key]
                writes += self._begin_write(key)
        if self.name == "object" and (self._listed_at is None or not 0 <= now - self._listed_at < REFRESH_S):
            self._listed_at = now
            self._number += 1
            move = Move(self._number, "list")
            self._under[self._number] = _Under(move, Key(0, b""), -1, -1)
            self._due.append(move)
        due, self._due = self._due, []
        return due

    def _take_in(self, found: Sequence[PageFile], *, evict: bool = False) -> None:
        """Others have stored these pages. Those of a list take free places alone: what this replica has used stays."""
        for page in found:
            key = Key(page.group, page.block_hash)
            if (evict or self.index.has_free) and (slot := self.index.reserve(key)) is not None:
                self.index.written(key, slot, ok=True)

    def _begin_write(self, key: Key) -> bool:
        if key not in self._host or (disk_slot := self.index.reserve(key)) is None:
            return False  # it has left the host's memory before its turn
        host_slot = self._host.slot(key)
        self._host.pin([host_slot])
        self._begin("write", key, host_slot, disk_slot)
        return True

    def moved(self, number: int, moved: Moved, now: float) -> None:
        """A move has ended on all ranks."""
        under = self._under.pop(number)
        ok, key, action = moved.error is None, under.key, under.move.action
        if action == "delete":
            return
        if action == "list":
            self._take_in(moved.found)
            if not ok:
                _log.warning("KV pages that other replicas have stored are not known: %s", moved.error)
            return
        if action == "find":
            self._looked(number, moved, now)
            return
        self._seconds[action] += moved.seconds
        if action == "write":
            self._host.unpin([under.host_slot])
            self.index.written(key, under.disk_slot, ok=ok)
            self._written += ok
            if not ok:
                self._failed_writes += 1
                self._paused_until = now + PAUSE_S
                self._wanted.clear()
                _log.warning("KV pages are not written to the %s for %g seconds: %s", _WORDS[self.name], PAUSE_S, moved.error)
            return
        self._reading.discard(key)
        self.index.unpin([under.disk_slot])
        self._host.written(key, under.host_slot, ok=ok)
        self._read += ok
        if not ok:
            self._failed += 1
            self.forget(key)
            if self._looks is not None and moved.seconds >= SLOW_S:
                self._looks.shut(now)
            _log.warning("a KV page could not be read from the %s, and is computed again: %s", _WORDS[self.name], moved.error)
        for wait in self._waits:
            wait.keys.discard(key)

    def _looked(self, number: int, moved: Moved, now: float) -> None:
        """A shared store has said what it has, or nothing."""
        assert self._looks is not None, "nobody asks"
        asked = self._looks.answered(number, now, ok=moved.error is None)
        if moved.error is not None:
            _log.warning("the shared store for KV pages is left alone for %g seconds: %s", SHUT_S, moved.error)
            return
        found = {Key(page.group, page.block_hash) for page in moved.found}
        for key in asked:
            if key not in found and key in self.index:
                self.index.forget(key)
        self._take_in(moved.found, evict=True)

    def take_waits(self, now: float) -> list[int]:
        """Requests that need wait no longer: their pages are there, or do not come."""
        looked = [] if self._looks is None else self._looks.take_waits(now)
        over = [wait for wait in self._waits if not wait.keys or now >= wait.began + PATIENCE_S]
        self._waits = [wait for wait in self._waits if wait not in over]
        for wait in over:
            self._loads.observe(wait.pages, now - wait.began, now)
        return [*looked, *(wait.index for wait in over)]

    def stats(self) -> TierStats:
        """Return the totals since the start."""
        return TierStats(
            pages=self.index.num_slots,
            pages_used=self.index.num_ready,
            stored_bytes=self._written * self._page_bytes,
            loaded_bytes=self._read * self._page_bytes,
            store_s=self._seconds["write"],
            load_s=self._seconds["read"],
            evicted_pages=self.index.num_evicted,
            failed_pages=self._failed,
            declined_tokens=self._loads.declined_tokens,
            failed_stores=self._failed_writes,
            failed_lookups=0 if self._looks is None else self._looks.num_failed,
        )
