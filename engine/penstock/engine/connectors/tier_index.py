"""The pages of a tier, host memory or a disk: an index without the bytes, which every rank keeps for itself.

A slot is free, being written, ready or forgotten. Only a ready one is found. A pinned slot is being read: it is not evicted, and
is free again only when the reader has released it.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from penstock.engine.connectors.eviction import Arc, Lru, Policy, PolicyName


class Key(NamedTuple):
    """A page's name."""

    group: int
    """Index of its KV group."""
    block_hash: bytes
    """Hash of the block, as in the prefix cache."""


class TierIndex:
    """Slots of one page each.

    Args:
        num_slots: Pages that fit.
        on_evict: Called with each evicted page.
        on_change: Called with each page that can be found from now on (True) or no more (False).
        policy: Which page is evicted.
    """

    def __init__(
        self,
        num_slots: int,
        on_evict: Callable[[Key], None] | None = None,
        on_change: Callable[[Key, bool], None] | None = None,
        policy: PolicyName = "lru",
    ) -> None:
        self._policy: Policy[Key] = Lru() if policy == "lru" else Arc(num_slots)
        self._on_evict = on_evict
        self._on_change = on_change
        self.num_slots = num_slots
        self.num_evicted = 0
        """Pages that made room for others."""
        self._ready: dict[Key, int] = {}
        self._writing: dict[Key, int] = {}
        self._free: list[int] = []
        self._num_touched = 0
        """Slots from here on have never been used: a large disk has many."""
        self._readers = Counter[int]()
        self._forgotten: set[int] = set()

    @property
    def num_ready(self) -> int:
        """Pages that can be found."""
        return len(self._ready)

    @property
    def num_room(self) -> int:
        """Pages that can be reserved now, those included that must evict another."""
        return self._num_free + len(self._ready) - len(self._readers.keys() - self._forgotten)

    @property
    def has_free(self) -> bool:
        """Whether a page can be reserved that evicts no other."""
        return self._num_free > 0

    @property
    def _num_free(self) -> int:
        return len(self._free) + self.num_slots - self._num_touched

    def __contains__(self, key: Key) -> bool:
        """Whether the page is there, completely written."""
        return key in self._ready

    def knows(self, key: Key) -> bool:
        """Whether the page is there or being written."""
        return key in self._ready or key in self._writing

    def ready(self) -> list[Key]:
        """Names of pages that can be found."""
        return list(self._ready)

    def known(self) -> list[Key]:
        """Names of pages that are there or being written."""
        return [*self._ready, *self._writing]

    def slot(self, key: Key) -> int:
        """Return the slot of a ready page."""
        return self._ready[key]

    def place(self, key: Key) -> int:
        """Return the slot of a page that is there or being written."""
        return self._ready[key] if key in self._ready else self._writing[key]

    def is_at(self, key: Key, slot: int) -> bool:
        """Whether the slot holds the page, or will when it is written."""
        return self._ready.get(key, self._writing.get(key)) == slot

    def touch(self, keys: Iterable[Key]) -> None:
        """Pages are used: they are evicted last, the first of them last of all."""
        for key in reversed(list(keys)):
            if key in self._ready:
                self._policy.used(key)

    def reserve(self, key: Key) -> int | None:
        """A slot for a page to be written, evicting another if need be; None where it is here already, or nothing can go."""
        if self.knows(key) or not (self._num_free or self._evict(key)):
            return None
        if self._free:
            slot = self._free.pop()
        else:
            slot, self._num_touched = self._num_touched, self._num_touched + 1
        self._writing[key] = slot
        return slot

    def written(self, key: Key, slot: int, *, ok: bool) -> None:
        """The writing of a reserved slot has ended; `ok`: it holds the page."""
        if self._writing.get(key) == slot:
            del self._writing[key]
            if ok:
                self._ready[key] = slot
                self._policy.stored(key)
                self._tell(key, True)
                return
        self._forgotten.discard(slot)
        self._free.append(slot)

    def pin(self, slots: Iterable[int]) -> None:
        """They are being read."""
        self._readers.update(slots)

    def unpin(self, slots: Iterable[int]) -> None:
        """They have been."""
        for slot in slots:
            self._readers[slot] -= 1
            if not self._readers[slot]:
                del self._readers[slot]
                if slot in self._forgotten:
                    self._forgotten.remove(slot)
                    self._free.append(slot)

    def forget(self, key: Key) -> None:
        """The page is not to be found any more."""
        if key in self._ready:
            self._policy.forgotten(key)
            self._remove(key)
        elif (slot := self._writing.pop(key, None)) is not None:
            self._forgotten.add(slot)

    def clear(self) -> None:
        """None is to be found any more."""
        for key in self.known():
            self.forget(key)

    def _evict(self, incoming: Key) -> bool:
        key = self._policy.victim(incoming, lambda key: self._ready[key] in self._readers)
        if key is None:
            return False
        self._remove(key)
        self.num_evicted += 1
        if self._on_evict is not None:
            self._on_evict(key)
        return True

    def _remove(self, key: Key) -> None:
        slot = self._ready.pop(key)
        self._tell(key, False)
        self._release(slot)

    def _tell(self, key: Key, found: bool) -> None:
        if self._on_change is not None:
            self._on_change(key, found)

    def _release(self, slot: int) -> None:
        if slot in self._readers:
            self._forgotten.add(slot)
        else:
            self._free.append(slot)
