"""The location of each adapter: on disk, in host memory, or in a slot on the device. Pure: time is an argument.

A slot is pinned while a request in it runs. Of the others, the least recently used one is reassigned. If adapters with requests
wait
for a slot longer than `PATIENCE_S`, the same number of those that have held theirs longest stop taking new requests. So every
adapter gets a turn, and a slot changes hands once for many requests.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from penstock.engine.core.plan import SlotLoad
from penstock.engine.core.scheduling.lora.adapter import Adapter, Residency
from penstock.engine.core.scheduling.request import Request
from penstock.engine.messages import AdapterInfo

PATIENCE_S = 0.5
"""Seconds for which an adapter waits for a slot before another's turn ends for it."""


class Claim(msgspec.Struct):
    """Requests wait for a place for an adapter."""

    since: float
    priority: int
    """The most urgent of them."""


class AdapterTable:
    """All adapters of one engine core.

    Args:
        max_loras: Slots; 0: the engine serves no adapters.
        max_cpu_loras: Adapters in the host's memory, those in slots included.
    """

    def __init__(self, max_loras: int = 0, max_cpu_loras: int = 0) -> None:
        self.slots: list[Adapter | None] = [None] * max_loras
        self.num_loads = 0
        """Times that an adapter took a slot where it was not."""
        self.num_reads = 0
        """Times that an adapter was read."""
        self.changed = False
        """Whether something has happened that may let a request start that waited for its adapter."""
        self._max_cpu_loras = max_cpu_loras
        self._adapters: dict[int, Adapter] = {}
        self._host: dict[int, Adapter] = {}
        self._reading: dict[int, Adapter] = {}
        self._claims: dict[int, Claim] = {}
        self._yielding: set[int] = set()
        self._yields_to = 0
        self._loads: list[SlotLoad] = []
        self._drops: list[int] = []
        self._reads: list[tuple[int, AdapterInfo]] = []
        self._clock = 0
        self._next_copy = 0

    def __iter__(self) -> Iterator[Adapter]:
        """Every adapter, those included that only their last requests use."""
        return iter(self._adapters.values())

    def get(self, lora_id: int) -> Adapter | None:
        """The adapter that takes requests under this number."""
        adapter = self._adapters.get(lora_id)
        return None if adapter is None or adapter.retired else adapter

    @property
    def is_reading(self) -> bool:
        """Whether any file is being read, or is to be."""
        return bool(self._reading)

    @property
    def num_free_slots(self) -> int:
        """Slots that no adapter holds."""
        return self.slots.count(None)

    def running(self) -> dict[str, int]:
        """The adapters in slots by name, each with its running requests."""
        return _counts((adapter.info.name, adapter.num_running) for adapter in self.slots if adapter is not None)

    def waiting(self) -> dict[str, int]:
        """Waiting requests by adapter, of those that have any."""
        return _counts((it.info.name, it.num_waiting) for it in self._adapters.values() if it.num_waiting)

    # --- adapters come and go ---

    def add(self, info: AdapterInfo) -> None:
        """Begins to read a new adapter, whatever is in the host's memory."""
        adapter = self._adapters[info.lora_id] = Adapter(info)
        self._read(adapter)

    def retire(self, adapter: Adapter) -> None:
        """Lets an adapter's last requests end, and then forgets it."""
        adapter.retired = True
        self._settle(adapter)

    def take_reads(self) -> list[tuple[int, AdapterInfo]]:
        """What is to be read: the copy's number, and of what."""
        reads, self._reads = self._reads, []
        return reads

    def read(self, copy: int, ok: bool) -> Adapter | None:
        """Record that a file has been read, or cannot be. Return its adapter, or None if the read is no longer wanted."""
        adapter = self._reading.pop(copy, None)
        if adapter is None:
            self._drops.append(copy)
            return None
        self.changed = True
        adapter.residency = Residency.IN_HOST if ok else Residency.ON_DISK
        if not ok:
            del self._host[adapter.info.lora_id]
        self._make_host_room(0)
        return adapter

    # --- requests come and go ---

    def joined(self, adapter: Adapter) -> None:
        """One more live request."""
        adapter.num_live += 1

    def left(self, adapter: Adapter) -> None:
        """A live request has ended."""
        adapter.num_live -= 1
        self._settle(adapter)

    def move_in(self, adapter: Adapter, now: float) -> int:
        """A request begins to run; returns its slot. `refuses` has said that it may."""
        if adapter.slot < 0:
            adapter.slot = self._give_slot()
            self.slots[adapter.slot] = adapter
            self._loads.append(SlotLoad(adapter.slot, adapter.copy))
            self.num_loads += 1
        if adapter.num_running == 0:
            adapter.turn_began = now
        self._end_claim(adapter)
        adapter.num_running += 1
        self._touch(adapter)
        return adapter.slot

    def move_out(self, adapter: Adapter) -> None:
        """A request does not run any more."""
        adapter.num_running -= 1
        self._touch(adapter)
        if adapter.num_running == 0:
            self.changed = True
            self._make_host_room(0)

    def empty_slots(self) -> None:
        """What the slots held is gone; nothing may run."""
        for adapter in self.slots:
            if adapter is not None:
                adapter.slot = -1
        self.slots = [None] * len(self.slots)
        self._loads.clear()

    # --- the step ---

    def begin(self, now: float) -> bool:
        """Before requests are admitted: whether those that wait for their adapter are to be looked at again."""
        self._yielding.clear()
        if ripe := [claim for claim in self._claims.values() if now - claim.since >= PATIENCE_S]:
            self._yields_to = min(claim.priority for claim in ripe)
            # Also one of which only a preempted request is left: new requests must not start beside it when it resumes.
            busy = sorted((adapter for adapter in self.slots if adapter and adapter.num_live), key=lambda it: it.turn_began)
            self._yielding.update(adapter.info.lora_id for adapter in busy[: len(ripe)])
        changed, self.changed = self.changed, False
        return changed

    def refuses(self, adapter: Adapter, request: Request, now: float) -> bool:
        """Whether a request must wait for its adapter; sees to it that it comes."""
        if adapter.slot >= 0:
            return adapter.info.lora_id in self._yielding and request.priority >= self._yields_to and not request.has_started
        if adapter.residency is Residency.READING:
            return True
        if adapter.residency is Residency.ON_DISK:
            if self._make_host_room(1):
                self._read(adapter)
                return True
        elif any(holder is None or holder.num_running == 0 for holder in self.slots):
            return False
        claim = self._claims.setdefault(adapter.info.lora_id, Claim(now, request.priority))
        claim.priority = min(claim.priority, request.priority)
        return True

    def take_loads(self) -> list[SlotLoad]:
        """Slots that have changed hands since the last call: for the plan of the step."""
        loads, self._loads = self._loads, []
        return loads

    def take_drops(self) -> list[int]:
        """Copies that are not needed any more, now that the loads taken are carried out."""
        drops, self._drops = self._drops, []
        return drops

    # --- places ---

    def _read(self, adapter: Adapter) -> None:
        adapter.copy = self._next_copy
        self._next_copy += 1
        adapter.residency = Residency.READING
        self._reading[adapter.copy] = self._host[adapter.info.lora_id] = adapter
        self._touch(adapter)
        self._reads.append((adapter.copy, adapter.info))
        self.num_reads += 1

    def _settle(self, adapter: Adapter) -> None:
        """Update the adapter after the number of its requests has fallen."""
        if adapter.num_waiting == 0:
            self._end_claim(adapter)
        if adapter.num_live == 0:
            self.changed = True
            if adapter.retired:
                del self._adapters[adapter.info.lora_id]
                self._evict(adapter)
            self._make_host_room(0)

    def _end_claim(self, adapter: Adapter) -> None:
        """End its claim: the adapters that had to yield may continue."""
        if self._claims.pop(adapter.info.lora_id, None) is not None:
            self.changed = True

    def _give_slot(self) -> int:
        """A free one, or else that of the idle adapter whose last use is the longest ago."""
        if None in self.slots:
            return self.slots.index(None)
        idle = min((adapter for adapter in self.slots if adapter and not adapter.num_running), key=lambda it: it.used)
        slot, idle.slot = idle.slot, -1
        self.changed = True  # its requests wait for a place from now on
        return slot

    def _make_host_room(self, count: int) -> bool:
        """Evict the least recently used adapters until `count` more fit into host memory. Return whether they fit.
        A new adapter is read even if there is no room, so that it can be checked at once."""
        while len(self._host) + count > self._max_cpu_loras:
            evictable = [adapter for adapter in self._host.values() if adapter.is_evictable]
            if not evictable:
                return False
            self._evict(min(evictable, key=lambda it: it.used))
        return True

    def _evict(self, adapter: Adapter) -> None:
        """Evict an adapter from its slot and from host memory."""
        self.changed = True
        if adapter.slot >= 0:
            self.slots[adapter.slot] = None
            adapter.slot = -1
        if self._host.pop(adapter.info.lora_id, None) is not None and adapter.residency is Residency.IN_HOST:
            self._drops.append(adapter.copy)
        self._reading.pop(adapter.copy, None)
        adapter.residency, adapter.copy = Residency.ON_DISK, -1

    def _touch(self, adapter: Adapter) -> None:
        self._clock += 1
        adapter.used = self._clock


def _counts(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Added up: an adapter that was replaced has the name of its successor."""
    counts = Counter[str]()
    for name, count in pairs:
        counts[name] += count
    return dict(counts)
