"""Pages in the host's memory, as the scheduler sees them: what is copied there, and what comes back from there.

A block is copied when it has been published, that is when its tokens are retired and accepted. The copy goes with the next plan,
and the page can be found when that plan has retired. A request whose prefix goes on in the host's memory is parked while its
pages are copied into blocks of its own (`load_queue`). They are published then, and the request waits for its turn like any other
that finds its prefix cached: so nothing is held by a request that waits, and a copy that fails costs nothing but the computation.

A disk, a store that replicas share and an object store may stand behind the host's memory (`lower_tier`), and other replicas
(`transfer`).
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import msgspec
import numpy as np

from penstock.api.events import BlockStored, Medium
from penstock.api.load_report import WaitingReason
from penstock.engine.cache.block_pool import NULL_BLOCK
from penstock.engine.cache.kv_manager import CacheHit, KVCacheManager
from penstock.engine.cache.pins import Owner
from penstock.engine.config import TransferConfig
from penstock.engine.connectors.connector import Source
from penstock.engine.connectors.eviction import PolicyName
from penstock.engine.connectors.load_costs import LoadCosts
from penstock.engine.connectors.load_queue import Load, LoadQueue, Part
from penstock.engine.connectors.lower_tier import LowerTier
from penstock.engine.connectors.moves import Lower
from penstock.engine.connectors.sightings import Sightings
from penstock.engine.connectors.tier_events import TierEvents
from penstock.engine.connectors.tier_index import Key, TierIndex
from penstock.engine.connectors.transfer.transfer import Transfer
from penstock.engine.core.measure.copies import CopyPace
from penstock.engine.core.plan import Int32, Transfers
from penstock.engine.core.scheduling.admission.rule import Candidate
from penstock.engine.core.scheduling.request import Request
from penstock.engine.messages import FinishReason, Lent, RemotePrefix
from penstock.engine.stats import OffloadStats, TierStats

_log = logging.getLogger(__name__)
_STORE = "store"


class Resumes(Protocol):
    """Resumes parked requests."""

    def unpark(self, index: int, now: float) -> None:
        """What the request was parked for is there; of no effect where it has ended or was not parked."""
        ...


class _Store(msgspec.Struct, frozen=True):
    key: Key
    slot: int
    block: int
    lasting: bool
    """Whether the name stands for the same content in another process, as in `CacheListener.published`."""


class _Job(msgspec.Struct, frozen=True):
    """What goes with one plan."""

    stores: list[_Store]
    loads: list[Part]


class Offload:
    """The scheduler's half.

    Args:
        kv: The cache, of which it hears.
        num_slots: Pages that fit into the host's memory.
        page_bytes: Of a page, on each rank.
        lower_pages: That fit on the disk and into the stores, where there are these.
        transfer: How pages go to other replicas and come from there; None: they do not.
        ranks: That keep pages.
        costs: What loads take, and whether they pay; None: each does.
        policy: Which page leaves a tier that is full.
        sightings: Which blocks requests have shown often enough to be copied; None: all blocks are copied.
        pace: How much may be copied beside a step, by its tokens of prompts and its rows that decode.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        num_slots: int,
        page_bytes: int,
        lower_pages: Mapping[Lower, int] | None = None,
        transfer: TransferConfig | None = None,
        ranks: int = 1,
        costs: LoadCosts | None = None,
        policy: PolicyName = "lru",
        sightings: Sightings | None = None,
        pace: Callable[[int, int], CopyPace] = lambda prefill_tokens, decodes: CopyPace(),
    ) -> None:
        self._costs = costs or LoadCosts()
        self._told: dict[Medium, TierEvents] = {name: TierEvents(kv, name) for name in ("memory", *(lower_pages or ()))}
        self.tier = TierIndex(num_slots, on_change=self._told["memory"].changed, policy=policy)
        self.transfer = None if transfer is None else Transfer(transfer, kv, self.tier, page_bytes, ranks)
        self.lower = [
            LowerTier(name, self.tier, pages, page_bytes, self._costs.lower[name], self._told[name].changed, policy)
            for name, pages in (lower_pages or {}).items()
        ]
        self._sightings = sightings
        self._kv = kv
        self._page_bytes = page_bytes
        self._published: dict[Key, tuple[int, bool]] = {}
        self._stores: list[_Store] = []
        self._loads = LoadQueue(page_bytes)
        self._pace = pace
        self._in_flight: dict[int, _Job] = {}
        self._stored = self._loaded = self._failed = 0
        self._loaded_tokens = self._queried_tokens = 0
        self._store_s = 0.0
        kv.listen(self)

    # --- what it hears from the cache ---

    @property
    def num_places(self) -> int:
        """Pages at most."""
        return self.tier.num_slots

    def names(self) -> Iterable[bytes]:
        """Return the names of the pages in host memory, and of those on their way there."""
        return [key.block_hash for key in [*self.tier.known(), *self._published]]

    def published(self, group: int, block: int, block_hash: bytes, *, lasting: bool) -> None:
        """The block can be found from now on."""
        if self._sightings is not None and not self._sightings.enough(block_hash):
            return
        self._published[Key(group, block_hash)] = block, lasting

    def forgotten(self, block_hash: bytes) -> None:
        """This content must not be found any more."""
        for group in range(self._kv.num_groups):
            key = Key(group, block_hash)
            self._published.pop(key, None)
            self.tier.forget(key)
            for lower in self.lower:
                lower.forget(key)

    def cleared(self) -> None:
        """Forget all content, since the weights may change."""
        self._published.clear()
        self.tier.clear()
        if self.transfer is not None:
            self.transfer.clear()
        for lower in self.lower:
            lower.clear()

    # --- what it hears of requests ---

    def arrived(self, request: Request, remote: RemotePrefix) -> None:
        """A request has come whose prefix another replica lends."""
        if self.transfer is not None:
            self.transfer.pulls.arrived(request.index, remote)

    def problem(self, request: Request) -> str | None:
        """Why a request must be refused for what another replica lends; pages that are optional are ignored instead."""
        if self.transfer is None or (remote := self.transfer.pulls.remote(request.index)) is None:
            return None
        problem = self.transfer.problem(request, request.num_prompt_tokens, remote)
        if problem is None:
            return None
        self.transfer.pulls.left(request.index)
        if not remote.optional:
            return f"kv_transfer_params: {problem}"
        _log.warning("request %s computes its prompt here: %s", request.request_id, problem)
        return None

    def finished(self, request: Request, reason: FinishReason) -> Lent | None:
        """A request ends that still holds its blocks. Returns what of its prompt is lent, where it asked for that."""
        if self._sightings is not None:
            self._store_seen(request, self._sightings)
        if self.transfer is None:
            return None
        self.transfer.pulls.left(request.index)
        # An adapter is known by a name, under which another replica may have another one.
        if not request.lends or reason not in (FinishReason.STOP, FinishReason.LENGTH) or request.adapter is not None:
            return None
        tables = self._kv.tables(request)
        for group, at, name in self.transfer.needed(request, request.num_prompt_tokens):
            key = Key(group, name)
            if not self.tier.knows(key) and at < len(tables[group]) and tables[group][at] != NULL_BLOCK:
                self._published.setdefault(key, (tables[group][at], True))
        self.store()
        return self.transfer.lend(request, request.num_prompt_tokens)

    def _store_seen(self, request: Request, sightings: Sightings) -> None:
        """Has blocks of a prompt copied that were seen too seldom when they were published, and are in the cache still."""
        names = [name for name in self._prompt_blocks(request) if sightings.enough(name)]
        for key in (Key(group, name) for name in names for group in range(self._kv.num_groups)):
            block = self._kv.pool.lookup(key.group, key.block_hash)
            if block is not None and not self.tier.knows(key):
                self._published.setdefault(key, (block, request.adapter is None))
        self.store()

    def _prompt_blocks(self, request: Request) -> list[bytes]:
        """The names of the blocks that its prompt fills."""
        return request.block_hashes[: request.num_prompt_tokens // self._kv.block_size]

    # --- the step ---

    def store(self) -> None:
        """Has blocks copied that have been published since the last step; before any block changes hands."""
        published, self._published = self._published, {}
        for key, (block, lasting) in published.items():
            if (slot := self.tier.reserve(key)) is not None:
                self._kv.pin([block], Owner(_STORE, slot))
                self._stores.append(_Store(key, slot, block, lasting))

    def refuses(self, candidate: Candidate) -> WaitingReason | None:
        """The rule by which a request waits for pages that are in the host's memory: once for each time that it waits."""
        request, local = candidate.request, candidate.hit
        if self._sightings is not None and not request.sighted:
            self._sightings.saw(self._prompt_blocks(request))
            request.sighted = True
        if not candidate.uses_cache or request.asked_elsewhere_at == request.num_preemptions:
            return None
        if self._fetch(request, candidate.num_tokens, local, candidate.now):
            return "remote_kv"
        request.asked_elsewhere_at = request.num_preemptions
        self._queried_tokens += candidate.num_tokens - local.num_tokens
        return "remote_kv" if self._load(request, candidate.num_tokens, local, candidate.now) else None

    def _fetch(self, request: Request, num_tokens: int, local: CacheHit, now: float) -> bool:
        """Begins to bring pages of the request's prefix into the host's memory: from another replica once, from each tier behind
        it once for each time that it waits."""
        if self.transfer is not None and (remote := self.transfer.pulls.remote(request.index)) is not None:
            pulls, limit = self.transfer.pulls, min(num_tokens, remote.num_tokens + 1)
            if self._bring(pulls, request, limit, local, lambda _: True, now):
                return True
            pulls.left(request.index)  # all of it is here
        since, asked = request.asked_tiers
        if since != request.num_preemptions:
            asked = 0
        for number, lower in enumerate(self.lower[asked:], asked + 1):
            if self._look(lower, request, num_tokens, local, now):
                return True
            request.asked_tiers = request.num_preemptions, number
            if lower.is_shut(now):
                continue
            pays = self._pays(lower, request, num_tokens, local, now)
            # What comes from a disk goes on in an object store perhaps: that is asked when this is here.
            if pays and self._bring(lower, request, num_tokens, local, lower.has, now):
                return True
        return False

    def _look(self, lower: LowerTier, request: Request, num_tokens: int, local: CacheHit, now: float) -> bool:
        """Begins to ask a shared store for what goes on where the local prefix ends, once for each time that it waits."""
        if request.looked_up_at == request.num_preemptions:
            return False
        names = request.block_hashes[local.num_tokens // self._kv.block_size : (num_tokens - 1) // self._kv.block_size]
        if not lower.look(request.index, [Key(group, name) for group in range(self._kv.num_groups) for name in names], now):
            return False
        request.looked_up_at = request.num_preemptions
        return True

    def _pays(self, lower: LowerTier, request: Request, num_tokens: int, local: CacheHit, now: float) -> bool:
        """Whether reading what a tier has beyond the host's memory is faster than computing it."""
        upto, missing = self._kv.elsewhere(request, num_tokens, local, lambda group, name: lower.has(Key(group, name)))
        here, _ = self._kv.elsewhere(request, num_tokens, local, lambda group, name: Key(group, name) in self.tier)
        pages = sum(Key(group, name) not in self.tier for group, _, name in missing)
        return not pages or self._costs.pays(here, upto - here, num_tokens - upto, pages, now, lower.name)

    def _bring(
        self, source: Source, request: Request, limit: int, local: CacheHit, has: Callable[[Key], bool], now: float
    ) -> bool:
        """Begins to bring what a source has of the first `limit` tokens; False: nothing is on its way."""
        while True:
            upto, missing = self._kv.elsewhere(request, limit, local, lambda group, name: has(Key(group, name)))
            keys = [Key(group, name) for group, _, name in missing]
            there = [self.tier.slot(key) for key in keys if key in self.tier]
            if len(there) == len(keys):
                return False
            # They must not make room for the others.
            self.tier.pin(there)
            lacking = len(keys) - len(there) - self.tier.num_room
            if lacking <= 0:
                began = source.begin(request.index, keys, now)
                self.tier.unpin(there)
                return began
            self.tier.unpin(there)
            # The host's memory cannot take them all: as many of the first as it can.
            limit = upto - -(-lacking // self._kv.num_groups) * self._kv.block_size + 1

    def _load(self, request: Request, num_tokens: int, local: CacheHit, now: float) -> bool:
        """Begins to load what goes on where the local prefix ends, if anything does and there is room for it."""
        upto, missing = self._kv.elsewhere(request, num_tokens, local, lambda group, name: Key(group, name) in self.tier)
        external = upto - local.num_tokens
        rest = num_tokens - upto
        if not external or not self._costs.pays(local.num_tokens, external, rest, len(missing), now):
            return False
        if self._kv.allocate(request, upto, local=local, external=external) is None:
            return False
        tables, keys = self._kv.tables(request), [Key(group, name) for group, _, name in missing]
        blocks, slots = [tables[group][at] for group, at, _ in missing], [self.tier.slot(key) for key in keys]
        load = Load(request, now, upto, external, keys, slots, blocks)
        self._kv.pin(load.blocks, load.owner)
        self.tier.pin(load.slots)
        self.tier.touch(load.keys)
        self._loads.add(load)
        return True

    def take(self, step_id: int, prefill_tokens: int, decodes: int) -> Transfers | None:
        """What the runner has to copy in this step, beside its rows: `decodes` of them, and chunks of `prefill_tokens`."""
        job, self._stores = _Job(self._stores, self._loads.take(self._pace(prefill_tokens, decodes))), []
        if not job.stores and not job.loads:
            return None
        self._in_flight[step_id] = job
        return Transfers(
            store_blocks=_array(store.block for store in job.stores),
            store_slots=_array(store.slot for store in job.stores),
            load_blocks=_array(block for part in job.loads for block in part.blocks),
            load_slots=_array(slot for part in job.loads for slot in part.slots),
        )

    def resume(self, book: Resumes, now: float) -> None:
        """Lets requests go on whose pages have come from a tier or another replica."""
        pulls = [] if self.transfer is None else [self.transfer.pulls]
        for source in [*self.lower, *pulls]:
            for index in source.take_waits(now):
                book.unpark(index, now)

    @property
    def has_errands(self) -> bool:
        """Whether the next plan has something to copy."""
        return bool(self._stores) or self._loads.is_due

    # --- the result ---

    def retire(self, step_id: int, book: Resumes, now: float, seconds: tuple[float, float] | None) -> None:
        """The step is over; `seconds`, of stores and loads: None where it failed."""
        job = self._in_flight.pop(step_id, None)
        if job is None:
            return
        self._store_s += 0.0 if seconds is None else seconds[0]
        for store in job.stores:
            self._kv.unpin([store.block], Owner(_STORE, store.slot))
            self.tier.written(store.key, store.slot, ok=seconds is not None)
            self._stored += seconds is not None
            for lower in self.lower if store.lasting and store.key in self.tier else []:
                lower.offer(store.key)
        for load in self._loads.retired(job.loads, None if seconds is None else seconds[1]):
            self._retire_load(load, book, now)

    def _retire_load(self, load: Load, book: Resumes, now: float) -> None:
        request = load.request
        # Forgotten meanwhile, or under other names: what has come is of no use.
        places = zip(load.keys, load.slots, strict=True)
        ok = load.ok and all(key in self.tier and self.tier.slot(key) == slot for key, slot in places)
        self.tier.unpin(load.slots)
        held = self._kv.holds(request)
        if held and ok and len(request.block_hashes) * self._kv.block_size >= load.upto:
            self._kv.commit(request, load.upto, lasting=request.adapter is None)
            self._loaded += len(load.blocks)
            self._loaded_tokens += load.external
            self._costs.memory.observe(len(load.blocks), now - load.began, now)
        else:
            self._failed += len(load.blocks)
            self._kv.invalidate(load.blocks)
        self._kv.unpin(load.blocks, load.owner)
        if held:
            self._kv.free(request)
            book.unpark(request.index, now)

    def copies(self) -> Iterable[BlockStored]:
        """Return what each tier holds, as the events before have said."""
        tiers: dict[Medium, TierIndex] = {"memory": self.tier, **{lower.name: lower.index for lower in self.lower}}
        return [event for name, told in self._told.items() for event in told.snapshot(tiers[name])]

    def tokens_per_s(self, medium: Medium, now: float) -> float:
        """Return how fast tokens have come from this tier into the KV cache of late; 0: unknown, or there is no such tier."""
        if medium not in self._told:
            return 0.0
        tiers = [self._costs.memory] if medium == "memory" else [self._costs.lower[medium], self._costs.memory]
        speeds = [tier.pages_per_s(now) for tier in tiers]
        return 0.0 if 0.0 in speeds else self._page_tokens / sum(1 / speed for speed in speeds)

    def transfer_line(self, now: float) -> tuple[float, float]:
        """Return the seconds that it takes to fetch a prompt's pages from another replica and to load them, whatever its length,
        and those that each token adds. (0, 0): unknown."""
        pull = None if self.transfer is None else self.transfer.pulls.times.line(now)
        load = self._costs.memory.line(now)
        if pull is None or load is None:
            return 0.0, 0.0
        return pull[0] + load[0], (pull[1] + load[1]) / self._page_tokens

    @property
    def _page_tokens(self) -> float:
        """Tokens of a sequence for each of its pages: those that all its groups have of a block count together."""
        return self._kv.block_size / self._kv.num_groups

    def stats(self) -> OffloadStats:
        """Return the totals since the start."""
        memory = TierStats(
            pages=self.tier.num_slots,
            pages_used=self.tier.num_ready,
            stored_bytes=self._stored * self._page_bytes,
            loaded_bytes=self._loaded * self._page_bytes,
            store_s=self._store_s,
            load_s=self._loads.seconds,
            evicted_pages=self.tier.num_evicted,
            failed_pages=self._failed,
            declined_tokens=self._costs.memory.declined_tokens,
        )
        lower = {tier.name: tier.stats() for tier in self.lower}
        transfer = None if self.transfer is None else self.transfer.stats()
        return OffloadStats(memory, lower, self._queried_tokens, self._loaded_tokens, transfer)


def _array(values: Iterable[int]) -> Int32:
    return np.fromiter(values, np.int32)
