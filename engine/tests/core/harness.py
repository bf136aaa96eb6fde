"""Scheduler, cache and fake runner as a machine that a test steps, with all invariants checked at every step."""

from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from fake_runner import FakeRunner

from penstock.api.events import AllBlocksCleared, BlockRemoved, BlockStored, Medium, RequestFinished
from penstock.engine.cache.block_pool import NULL_BLOCK
from penstock.engine.cache.kv_manager import KVCacheManager
from penstock.engine.cache.layout import KVGroup, full_attention
from penstock.engine.commands import LoadAdapter
from penstock.engine.config import (
    CacheConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    PoolingConfig,
    SchedulerConfig,
    SchedulingPolicy,
)
from penstock.engine.connectors.offload import Offload
from penstock.engine.connectors.sightings import sightings_of
from penstock.engine.core.control.adapters import AdapterControl
from penstock.engine.core.control.control_error import ControlError
from penstock.engine.core.executor import InlineExecutor
from penstock.engine.core.plan import SampleInputs, StepPlan, Transfers
from penstock.engine.core.scheduling.lora.adapter import Residency
from penstock.engine.core.scheduling.lora.adapter_table import AdapterTable
from penstock.engine.core.scheduling.outputs import RequestOutputs
from penstock.engine.core.scheduling.request import RequestStatus
from penstock.engine.core.scheduling.scheduler import Scheduler
from penstock.engine.messages import AddRequest, Finished, LifecycleEvent
from penstock.engine.multimodal.inputs import ImageInput
from penstock.engine.multimodal.pixels import Pixels
from penstock.engine.sampling import RepetitionDetection, SamplingParams
from penstock.prompt.hashing import BlockHasher, PromptItem


def make_config(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 64,
    max_num_seqs: int = 8,
    budget: int = 16,
    threshold: int = 0,
    caching: bool = True,
    watermark: float = 0.0,
    max_num_waiting: int = 1000,
    depth: int = 1,
    policy: SchedulingPolicy = "fcfs",
    chunked: bool = True,
    weights: dict[str, float] | None = None,
    loras: tuple[int, int] | None = None,
    pooling: PoolingConfig | None = None,
    drafts: int = 0,
    images: tuple[int, int] = (0, 0),
    whole_images: bool = False,
    image_lookahead: int = 0,
) -> EngineConfig:
    """`images`: embeddings that a step makes, and that are kept."""
    return EngineConfig(
        lora=LoraConfig(max_loras=loras[0], max_cpu_loras=loras[1]) if loras else None,
        model=ModelConfig(
            path=Path("/nowhere"),
            served_names=("m",),
            architecture="Fake",
            dtype="float32",
            max_model_len=max_model_len,
            eos_token_ids=(),
            pooling=pooling,
        ),
        cache=CacheConfig(block_size=block_size, num_blocks=num_blocks, enable_prefix_caching=caching),
        scheduler=SchedulerConfig(
            policy=policy,
            enable_chunked_prefill=chunked,
            tenant_weights=weights or {},
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold,
            max_num_waiting=max_num_waiting,
            watermark=watermark,
            num_speculative_tokens=drafts,
            max_encoder_tokens=images[0],
            encoder_cache_size=images[1],
            whole_images=whole_images,
            image_lookahead=image_lookahead,
        ),
        depth=depth,
    )


def make_scheduler(config: EngineConfig, groups: Sequence[KVGroup] = (), host_pages: int = 0) -> Scheduler:
    assert config.cache.num_blocks is not None
    kv = KVCacheManager(
        config.cache.num_blocks,
        groups or full_attention(config.cache.block_size),
        enable_prefix_caching=config.cache.enable_prefix_caching,
        watermark=config.scheduler.watermark,
        max_in_flight=config.max_in_flight,
    )
    table = AdapterTable(config.lora.max_loras, config.lora.max_cpu_loras) if config.lora else None
    hasher = BlockHasher(config.cache.block_size, "test")
    offload = Offload(kv, host_pages, 1, sightings=sightings_of(config.cache.offload_threshold)) if host_pages else None
    return Scheduler(config.scheduler, config.model.max_model_len, kv, hasher, table, config.model.pooling, offload)


def make_request(
    index: int,
    prompt: list[int],
    max_tokens: int = 8,
    *,
    stop: tuple[int, ...] = (),
    priority: int = 0,
    salt: str | None = None,
    tenant: str = "",
    deadline: float | None = None,
    complete: bool = True,
    repetition: RepetitionDetection | None = None,
    lora_id: int = 0,
    images: Sequence[PromptItem] = (),
) -> AddRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=stop, repetition_detection=repetition)
    return AddRequest(
        index,
        f"r{index}",
        list(prompt),
        sampling,
        arrival_time=float(index),
        priority=priority,
        cache_salt=salt,
        tenant=tenant,
        deadline=deadline,
        input_complete=complete,
        lora_id=lora_id,
        images=[ImageInput(item, Pixels(1, item.length, b"")) for item in images],
    )


class Machine:
    """`step` plans, runs and, once `depth` plans are in flight, retires one."""

    def __init__(self, config: EngineConfig, groups: Sequence[KVGroup] = (), host_pages: int = 0) -> None:
        self.config = config
        self.groups = groups or full_attention(config.cache.block_size)
        self.scheduler = make_scheduler(config, self.groups, host_pages)
        self.runner = FakeRunner(config, self.groups)
        assert config.cache.num_blocks is not None
        self.runner.initialize_kv_cache(config.cache.num_blocks)
        self.runner.initialize_offload(host_pages)
        self.streams: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.pooled: dict[int, float] = {}
        self.finished: dict[int, Finished] = {}
        self.ended: dict[str, RequestFinished] = {}
        self.cached_tokens: dict[int, int] = {}
        self.plans: list[StepPlan] = []
        self.planned: list[int] = []
        self.told: dict[int, tuple[int, int]] = {}
        self.compared: set[int] = set()
        self.now = 0.0
        self.lifecycle: dict[int, list[tuple[LifecycleEvent, float]]] = {}
        self.live: dict[Medium | None, set[bytes]] = {None: set()}
        """Blocks by medium, as the event stream says; None: in the KV cache."""
        self._results: deque = deque()
        self.control = AdapterControl(self.scheduler, InlineExecutor(self.runner), config.model.served_names)

    @property
    def live_hashes(self) -> set[bytes]:
        """What the event stream says of the KV cache."""
        return self.live[None]

    def add(self, *requests: AddRequest) -> None:
        for request in requests:
            self.scheduler.add(request, self.now)
            self._take(self.scheduler.take_outputs())

    def abort(self, *indexes: int) -> None:
        self.scheduler.abort(indexes)
        self._take(self.scheduler.take_outputs())

    def load(self, name: str, uri: str = "", replace: bool = False) -> str | None:
        """Loads an adapter; what was wrong with it, if anything was."""
        errors: list[str | None] = []
        try:
            self.control.load(LoadAdapter(name, uri or f"/{name}", None, replace), errors.append)
        except ControlError as error:
            return str(error)
        self.control.pump()
        return errors[0] if errors else "not yet"

    def ask(self, index: int, prompt: list[int], max_tokens: int, adapter: str, **fields) -> None:
        """A request for an adapter by its name."""
        info = self.scheduler.adapters.find(adapter)
        assert info is not None
        self.add(make_request(index, prompt, max_tokens, lora_id=info.lora_id, **fields))

    def step(self, *, idle: bool = False) -> StepPlan | None:
        self.now += 1
        self.control.pump()
        preemptions = self.scheduler.totals.num_preemptions
        plan = self.scheduler.schedule(self.now, idle=idle)
        if plan is not None:
            self._check_plan(plan, idle=idle, preempted=self.scheduler.totals.num_preemptions > preemptions)
            self.plans.append(plan)
            self.planned = self.scheduler._tenancy.indexes[plan.rows].tolist()
            self.runner.execute(plan)
            self._results.append((self.planned, self.runner.sample(SampleInputs(plan.step_id))))
        if self._results and (plan is None or len(self._results) >= self.config.depth):
            requests, result = self._results.popleft()
            proposed = [0] * len(requests) if result.drafts is None else (result.drafts >= 0).sum(axis=1).tolist()
            self.told = dict(zip(requests, zip(result.counts.tolist(), proposed, strict=True), strict=True))
            self._take(self.scheduler.update(result, self.now))
        else:
            self._take(self.scheduler.take_outputs())
        self._check_state()
        return plan

    def run(self, limit: int = 10_000) -> "Machine":
        self._take(self.scheduler.take_outputs())
        for _ in range(limit):
            if not (self.scheduler.indexes() or self._results or self.scheduler.encoder.is_busy):
                break
            self.step()
        else:
            raise AssertionError(f"still not done after {limit} steps")
        return self

    def check_no_leak(self) -> None:
        pool = self.scheduler.kv.pool
        assert pool.num_used == 0 and not any(pool.ref_counts)
        assert self.scheduler.num_running == 0 and not self.scheduler.indexes()
        assert sorted(self.scheduler._tenancy.free_rows) == list(range(self.config.scheduler.max_num_seqs))
        assert self.scheduler.encoder.cache.held == 0 and not self.scheduler.encoder.rows
        assert {event.request_id for event in self.ended.values()} == {f"r{index}" for index in self.finished}

    def _take(self, outputs: RequestOutputs) -> None:
        counts = np.diff(outputs.offsets)
        assert (counts > 0).all() and outputs.offsets[-1] == len(outputs.token_ids)
        owners = np.repeat(outputs.indexes, counts)
        for index, token in zip(owners.tolist(), outputs.token_ids.tolist(), strict=True):
            assert index not in self.finished, "a token after the end"
            self.streams.setdefault(index, []).append(token)
        if outputs.logprobs is not None:
            positions = np.frombuffer(outputs.logprobs.positions, "<i4")
            for position, value in zip(positions, np.frombuffer(outputs.logprobs.sampled, "<f4"), strict=True):
                self.logprobs.setdefault(int(owners[position]), []).append(float(value))
        if (pooled := outputs.pooled) is not None:
            self.pooled |= zip(np.frombuffer(pooled.indexes, "<i8").tolist(), np.frombuffer(pooled.vectors, "<f4"), strict=True)
        for started in outputs.started:
            assert started.index not in self.cached_tokens, "started twice"
            self.cached_tokens[started.index] = started.cached_tokens
        if (lifecycle := outputs.lifecycle) is not None:
            columns = np.frombuffer(lifecycle.indexes, "<i8"), lifecycle.events, np.frombuffer(lifecycle.times, "<f8")
            for index, event, at in zip(*columns, strict=True):
                self.lifecycle.setdefault(int(index), []).append((LifecycleEvent(event), float(at)))
        for finished in outputs.finished:
            assert finished.index not in self.finished, "ended twice"
            self.finished[finished.index] = finished
        self._take_events()

    def _take_events(self) -> None:
        for event in self.scheduler.take_events():
            match event:
                case BlockStored(hashes, medium):
                    blocks = self.live.setdefault(medium, set())
                    assert not blocks.intersection(hashes)
                    blocks.update(hashes)
                case BlockRemoved(hashes, medium):
                    assert self.live[medium].issuperset(hashes)
                    self.live[medium].difference_update(hashes)
                case AllBlocksCleared():
                    for blocks in self.live.values():
                        blocks.clear()
                case RequestFinished():
                    assert event.request_id not in self.ended
                    self.ended[event.request_id] = event

    def _check_plan(self, plan: StepPlan, *, idle: bool, preempted: bool) -> None:
        limits = self.config.scheduler
        assert (
            (0 if idle or plan.transfers is not None or plan.encoder_runs else 1)
            <= plan.num_new_tokens.sum()
            <= limits.max_num_batched_tokens
        )
        assert (plan.num_new_tokens > 0).all() and len(set(plan.rows.tolist())) == len(plan.rows)
        assert self.scheduler.num_running <= limits.max_num_seqs
        assert not (preempted and plan.admissions), "a step that preempted admits nobody"
        if limits.long_prefill_token_threshold:
            known = plan.num_new_tokens - plan.num_drafts if len(plan.num_drafts) else plan.num_new_tokens
            assert (known <= limits.long_prefill_token_threshold).all()
        assert {admission.row for admission in plan.admissions} <= set(plan.rows.tolist())
        if plan.transfers is not None:
            self._check_transfers(plan, plan.transfers)

    def _check_transfers(self, plan: StepPlan, transfers: Transfers) -> None:
        """Pages are copied while the rows run, so nobody else may write to them, and nobody read what is on its way."""
        stored, loaded = set(transfers.store_blocks.tolist()), set(transfers.load_blocks.tolist())
        table = self.scheduler.table
        for row in plan.rows.tolist():
            for number, group in enumerate(self.groups):
                blocks = table.block_tables[number][row, : table.num_blocks[number][row]].tolist()
                assert not stored & set(blocks[table.num_settled[row] // group.block_size :]), "a block that the row writes to"
                assert not loaded & set(blocks), "the row reads what is on its way"

    def _check_state(self) -> None:
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        holders: Counter[int] = Counter()
        for pinned in scheduler.kv._pins._blocks.values():
            holders.update(list(pinned))
        for request in scheduler._book._live.values():
            for number, (group, table) in enumerate(zip(self.groups, scheduler.kv.tables(request), strict=True)):
                live = [block for block in table if block != NULL_BLOCK]
                holders.update(live)
                assert group.window is not None or len(live) == len(table)
                assert len(live) <= group.max_blocks(len(table) * group.block_size, self.config.max_in_flight)
                loads = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
                assert request.row >= 0 or loads or not table, "a request without a row holds no blocks"
                if request.row >= 0:
                    count = scheduler.table.num_blocks[number][request.row]
                    known = scheduler.table.block_tables[number][request.row, :count].tolist()
                    # A row keeps the numbers of blocks that windows have left behind; nobody reads there.
                    assert len(known) == len(table)
                    assert all(held in (block, NULL_BLOCK) for held, block in zip(table, known, strict=True))
            if request.adapter is not None and request.row >= 0:
                assert request.adapter.slot >= 0, "whoever runs has its adapter in a slot"
            if request.row >= 0:
                row = request.row
                assert scheduler.table.num_settled[row] <= scheduler.table.num_computed[row] <= scheduler.table.num_tokens[row]
                assert scheduler.table.num_tokens[request.row] <= scheduler._tenancy.limits[request.row]
        self._check_adapters()
        self._check_images()
        assert {block: count for block, count in enumerate(pool.ref_counts) if count} == dict(holders)
        free = list(pool.free_list)
        assert len(free) == len(set(free)) == pool.num_free
        assert not set(free) & set(holders) and len(free) + len(holders) == pool.num_blocks - 1
        self._take_events()
        held = {event.medium: set(event.block_hashes) for event in self.scheduler.cached_blocks()}
        assert self.live == held, "the event stream tells another story than the cache and its tiers"
        assert held[None] == set(pool.cached_hashes())

    def _check_images(self) -> None:
        """The cache's account is right, and the runner has what it says but for what the next plan drops."""
        cache, running = self.scheduler.encoder.cache, {r.index for r in self.scheduler._tenancy.running}
        lengths = cache._lengths
        assert cache.used == sum(lengths.values()) <= cache.size
        assert cache.held == sum(lengths[name] for name, holders in cache._holders.items() if holders)
        assert set(cache._idle) == {name for name, holders in cache._holders.items() if not holders}
        assert running.issuperset(set().union(*cache._holders.values()) - {-1})
        lengths = {name: length for name, length in lengths.items() if name not in self.scheduler.encoder._under_way}
        assert self.runner.embeddings == lengths | {name: self.runner.embeddings[name] for name in cache._evicted}

    def _check_adapters(self) -> None:
        table, live = self.scheduler.adapters.table, self.scheduler._book._live.values()
        held = [(slot, adapter) for slot, adapter in enumerate(table.slots) if adapter is not None]
        assert all(adapter.slot == slot and adapter.residency is Residency.IN_HOST for slot, adapter in held)
        assert len({id(adapter) for _, adapter in held}) == len(held)
        for adapter in table:
            mine = [request for request in live if request.adapter is adapter]
            running = sum(request.row >= 0 for request in mine)
            assert (adapter.num_live, adapter.num_running) == (len(mine), running)
            assert adapter.slot < 0 or table.slots[adapter.slot] is adapter
            assert not running or adapter.slot >= 0
            assert adapter.num_live or not adapter.retired
