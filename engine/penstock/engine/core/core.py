"""The engine core: scheduler, executor and measurements behind one step. No sockets, no asyncio."""

import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import numpy as np

from penstock.api.events import Event, Medium
from penstock.api.load_report import LoadReport
from penstock.engine.cache.kv_manager import KVCacheManager
from penstock.engine.cache.layout import KVGroup, full_attention
from penstock.engine.config import EngineConfig, LoraModule
from penstock.engine.connectors.connector import Pump
from penstock.engine.connectors.load_costs import LoadCosts
from penstock.engine.connectors.lower_pump import LowerPump
from penstock.engine.connectors.offload import Offload
from penstock.engine.connectors.sightings import sightings_of
from penstock.engine.connectors.transfer.pump import TransferPump
from penstock.engine.core.control.controls import Controls
from penstock.engine.core.executor import Executor, StepFailed
from penstock.engine.core.grammar.compiler import Compiler
from penstock.engine.core.grammar.grammars import Grammars
from penstock.engine.core.measure.load import LoadMeter
from penstock.engine.core.measure.prompt_cost import chunk_pairs
from penstock.engine.core.measure.step_meter import StepMeter
from penstock.engine.core.memory import OffloadSize
from penstock.engine.core.plan import GraphReport, Int32, StepPlan, StepResult, ints
from penstock.engine.core.scheduling.lora.adapter_table import AdapterTable
from penstock.engine.core.scheduling.outputs import RequestOutputs
from penstock.engine.core.scheduling.scheduler import Scheduler
from penstock.engine.core.wave import Wave
from penstock.engine.messages import (
    FRONTEND_SHIFT,
    AbortRequests,
    AdapterInfo,
    AdaptersChanged,
    AddRequest,
    Control,
    ControlDone,
    CoreInput,
    ExtendPrompt,
    FrontendJoined,
    FrontendLeft,
    StepOutputs,
)
from penstock.engine.roofline import Ceilings
from penstock.engine.stats import CoreStats, ExpertStats
from penstock.prompt.hashing import BlockHasher

MAX_FAILURES = 3
"""Failed steps in a row after which the core gives up: what fails every time is not the requests' fault."""
STEP_FAILED = "step_failed"
"""`Finished.code` of requests whose step failed."""

_log = logging.getLogger(__name__)


class _Submitted(msgspec.Struct, frozen=True):
    plan: StepPlan
    time: float
    ends: Int32
    """[r]: how many tokens of each row are computed after it."""
    num_tokens: int
    """Of all rows."""


class EngineCore:
    """One replica's step loop, one step a call.

    Args:
        config: Its `depth` is the number of plans in flight.
        executor: Runs the plans.
        num_blocks: KV blocks of the executor's runner.
        epoch: Start of the engine, milliseconds since the Unix epoch.
        engine_index: The core's number among those of its frontend.
        groups: Of the runner's KV layout; None: full attention in every layer.
        ceilings: Of the runner's device, where they are known.
        offload: What the host's memory holds of pages; None: nothing.
        wave: Joins the steps of other cores; None: this one's are its own.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        num_blocks: int,
        epoch: int,
        engine_index: int = 0,
        groups: Sequence[KVGroup] | None = None,
        ceilings: Ceilings | None = None,
        offload: OffloadSize | None = None,
        wave: Wave | None = None,
    ) -> None:
        cache = config.cache
        kv = KVCacheManager(
            num_blocks,
            groups or full_attention(cache.block_size),
            enable_prefix_caching=cache.enable_prefix_caching,
            watermark=config.scheduler.watermark,
            max_in_flight=config.max_in_flight,
        )
        hasher, lora = BlockHasher(cache.block_size, cache.hash_seed), config.lora
        table = AdapterTable(lora.max_loras, lora.max_cpu_loras) if lora is not None else AdapterTable()
        self._offload = None
        self._meter = LoadMeter()
        if offload is not None:
            sizes = offload.pages, offload.page_bytes, offload.lower_pages
            # Another replica has computed what it lends so that this one need not: such pages are always loaded.
            by_cost = cache.loads_by_cost and config.transfer is None
            costs = LoadCosts(self._meter.saved_s if by_cost else None)
            sightings = sightings_of(cache.offload_threshold)
            how = config.transfer, len(offload.keepers), costs, cache.eviction_policy, sightings, self._meter.pace
            self._offload = Offload(kv, *sizes, *how)
        self.scheduler = Scheduler(
            config.scheduler, config.model.max_model_len, kv, hasher, table, config.model.pooling, self._offload
        )
        self.num_steps = 0
        self._pumps = [] if offload is None else _pumps(self._offload, executor, offload.keepers)
        served = config.model.served_names
        self._controls = Controls(self.scheduler, executor, config.profile_dir, served, self._pumps)
        grammars = Compiler(config.model)
        grammars.prepare()
        self._grammars = Grammars(self.scheduler, grammars)
        self._depth = config.depth
        self._executor = executor
        self._wave = wave
        # All ranks of all cores have counted the same.
        self._tells_experts = config.parallel.eplb is not None and engine_index == 0
        self._tensor_ranks = config.parallel.tensor_parallel_size
        self._epoch = epoch
        self._engine_index = engine_index
        self._step_meter = StepMeter(config.model.cost, ceilings, config.scheduler.num_speculative_tokens)
        self._graphs: GraphReport | None = None
        self._has_graphs = config.graphs.mode != "NONE"
        self._may_capture = self._has_graphs
        self._submitted: deque[_Submitted] = deque()
        self._unsampled = False
        self._failures = 0
        self._last_end = 0.0
        self._seq = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        own = self.scheduler.has_work or bool(self._submitted) or self._controls.due is not None
        return own or (self._wave is not None and self._wave.is_behind)

    @property
    def is_reading(self) -> bool:
        """Whether adapters are being read, grammars compiled or pages moved: a step takes in those that have been."""
        moving = any(pump.is_moving for pump in self._pumps)
        return moving or self._controls.adapters.is_reading or self._grammars.is_compiling

    @property
    def may_capture(self) -> bool:
        """Whether idle time is good for CUDA graphs that are not there yet. A request may wait for what is read."""
        return self._may_capture and not self.has_work and not self.is_reading and self._controls.asleep is None

    @property
    def next_command(self) -> str | None:
        """The command with which the next step begins; None: it begins with none."""
        return None if self._submitted else self._controls.due

    def handle(self, message: CoreInput) -> None:
        """Takes in what the frontend says."""
        match message:
            case AddRequest():
                now = time.time()
                self.scheduler.add(message, now)
                self._grammars.add(message, now)
            case ExtendPrompt():
                self.scheduler.extend(message, time.time())
            case AbortRequests(indexes):
                self.scheduler.abort(indexes)
            case Control():
                self._controls.handle(message)
            case FrontendLeft(frontend):
                self.scheduler.abort([index for index in self.scheduler.indexes() if index >> FRONTEND_SHIFT == frontend])
            case FrontendJoined():
                raise ValueError("a core without further frontends heard of one")

    def step(self) -> StepOutputs | None:
        """Fills the pipeline and retires the oldest plan, if there is one; None where there is nothing to tell.

        A command waits until nothing is in flight, and no step begins before it is carried out.

        Raises:
            Exception: Whatever the runner raised, other than a `StepFailed` now and then; the core cannot go on then.
        """
        self._controls.adapters.pump()
        self._grammars.pump(time.time())
        for pump in self._pumps:
            pump.pump(time.time())
        if self._offload is not None:
            self._offload.resume(self.scheduler, time.time())
        if self.next_command is not None:
            self._controls.carry_out(time.time())
            self._may_capture = self._has_graphs  # with other weights or another cache there are other graphs
        while self._may_submit and (plan := self.scheduler.schedule(time.time())):
            ends: Int32 = self.scheduler.table.num_computed[plan.rows]
            if len(plan.rows):
                self._step_meter.submitted(plan, ends)
            self._submitted.append(_Submitted(plan, time.perf_counter(), ends, int(plan.num_new_tokens.sum())))
            if self._wave is not None:
                self._wave.begin()
            self._unsampled = self.scheduler.is_masked
            self._executor.submit(plan, self._unsampled)
            self._sample()
        if self._submitted:
            outputs = self._retire()
            self._sample()
        elif self._wave is not None and self._wave.is_behind:
            self._wave.join()
            self._executor.call("serve_others")
            outputs = self.scheduler.take_outputs()
        elif self.scheduler.is_stuck:
            raise RuntimeError(f"no request can run: {self.scheduler.num_running} running, {self.scheduler.waiting()} waiting")
        else:
            outputs = self.scheduler.take_outputs()
        return None if outputs.is_empty else outputs.frame(self._engine_index, self.num_steps, time.time())

    @property
    def _may_submit(self) -> bool:
        # A runner samples each step before it executes the next one.
        has_room = not self._controls.due and not self._unsampled and len(self._submitted) < self._depth
        return has_room and not self.scheduler.awaits_drafts

    def _sample(self) -> None:
        """Has the step submitted last sampled: at once, unless masks depend on the step before, which must retire first. They
        are filled while the forward pass runs."""
        if self._unsampled and not self.scheduler.awaits_masks:
            self._executor.sample(self.scheduler.sample_inputs())
            self._unsampled = False

    def _retire(self) -> RequestOutputs:
        """Takes in the oldest plan's result. A step that failed ends its requests; several in a row, the core."""
        submitted = self._submitted.popleft()
        try:
            result = self._executor.collect()
        except StepFailed as error:
            self.num_steps += 1
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                raise
            _log.exception("step %d failed, and its %d requests with it", submitted.plan.step_id, len(submitted.plan.rows))
            return self.scheduler.fail_step(str(error), STEP_FAILED, time.time())
        self._failures = 0
        outputs = self.scheduler.update(result, time.time())
        self._observe(submitted, result)
        return outputs

    def capture_graph(self) -> None:
        """Captures one of the graphs that are missing; while it does, requests wait. Only where `may_capture`."""
        self._graphs, *_ = self._executor.call("capture_graph")
        self._may_capture = self._graphs is not None and self._graphs.pending > 0

    def check(self) -> None:
        """Raises `GroupFailed` where a process that runs the model has gone, while there was nothing to do."""
        self._executor.check()

    def close(self) -> None:
        """Ends whatever runs plans, once the steps in flight are over."""
        if self._unsampled:
            self._submitted.pop()
        while self._submitted:
            self._submitted.popleft()
            with suppress(StepFailed):
                self._executor.collect()
        self._grammars.close()
        self._executor.close()

    def open_connectors(self) -> None:
        """Opens what lies behind the host's memory: a disk, other replicas. `ConfigError` where it cannot be used."""
        for pump in self._pumps:
            pump.open(time.time())

    def load_adapters(self, modules: Sequence[LoraModule]) -> None:
        """Loads adapters before the first request; `ConfigError` names the first that cannot be."""
        self._controls.adapters.load_now(modules)

    def adapters(self) -> list[AdapterInfo]:
        """Return the adapters that requests can use."""
        return self.scheduler.adapters.infos()

    def take_adapters(self) -> AdaptersChanged | None:
        """The same, where they have changed since the last call."""
        changed = self._controls.adapters.take_changed()
        return None if changed is None else AdaptersChanged(changed)

    def take_replies(self) -> list[ControlDone]:
        """Answers to commands since the last call."""
        return self._controls.take_replies()

    def take_events(self) -> list[Event]:
        """What the event stream must tell since the last call."""
        return self.scheduler.take_events()

    def stats(self) -> CoreStats:
        """The state of the core, with a new load report."""
        scheduler, now, lora = self.scheduler, time.perf_counter(), self.scheduler.adapters.table
        fetch = (0.0, 0.0) if self._offload is None else self._offload.transfer_line(time.time())
        report = LoadReport(
            epoch=self._epoch,
            seq=self._seq,
            num_requests_running=scheduler.num_running,
            num_requests_waiting=scheduler.waiting(),
            max_num_seqs=scheduler.config.max_num_seqs,
            kv_cache_usage_perc=scheduler.kv.usage,
            # A sequence needs a block in each group; the picker reckons in blocks of sequences.
            kv_blocks_total=scheduler.kv.num_blocks // scheduler.kv.num_groups,
            kv_blocks_reclaimable=scheduler.kv.num_free_blocks // scheduler.kv.num_groups,
            prefill_backlog_tokens=scheduler.prefill_backlog(),
            prefill_tokens_per_s=self._meter.prefill_tokens_per_s,
            decode_step_s=self._meter.decode_step_s,
            prompt_tokens_per_s=self._meter.prompt_tokens_per_s(now),
            generation_tokens_per_s=self._meter.generation_tokens_per_s(now),
            lora_slots=len(lora.slots),
            lora_slots_free=lora.num_free_slots,
            lora_running=lora.running(),
            lora_waiting=lora.waiting(),
            adapters=scheduler.adapters.names(),
            memory_tier_tokens_per_s=self._tier_speed("memory"),
            disk_tier_tokens_per_s=self._tier_speed("disk"),
            store_tier_tokens_per_s=self._tier_speed("store"),
            object_tier_tokens_per_s=self._tier_speed("object"),
            transfer_s=fetch[0],
            transfer_s_per_token=fetch[1],
        )
        self._seq += 1
        return CoreStats(
            report=report,
            steps=self.num_steps,
            preemptions=scheduler.totals.num_preemptions,
            prefix_queries=scheduler.totals.prefix_queries,
            prefix_hits=scheduler.totals.prefix_hits,
            preempted_tokens=scheduler.totals.preempted_tokens,
            resumed_cached_tokens=scheduler.totals.resumed_cached_tokens,
            step=self._step_meter.stats(),
            paused=self._controls.paused,
            asleep=self._controls.asleep,
            lora_loads=lora.num_loads,
            lora_reads=lora.num_reads,
            graphs=self._graphs,
            command=self.next_command,
            waits=scheduler.totals.waits.buckets(),
            grammars=self._grammars.stats(),
            encoder=scheduler.encoder_stats(),
            offload=None if self._offload is None else self._offload.stats(),
            experts=self._expert_stats() if self._tells_experts else None,
        )

    def _expert_stats(self) -> ExpertStats | None:
        told: list[ExpertStats | None] = self._executor.call_beside("expert_stats")
        return ExpertStats.of_stages(told[:: self._tensor_ranks])

    def _tier_speed(self, medium: Medium) -> float:
        return 0.0 if self._offload is None else self._offload.tokens_per_s(medium, time.time())

    def _observe(self, submitted: _Submitted, result: StepResult) -> None:
        now, plan = time.perf_counter(), submitted.plan
        # With several plans in flight a step begins when the one before it ends.
        seconds = now - max(submitted.time, self._last_end)
        self._last_end = now
        self.num_steps += 1
        if not len(plan.rows):  # the model has done nothing that could be measured
            return
        self._step_meter.retired(plan, result, seconds, submitted.num_tokens)
        tokens, ends = _chunks(submitted)
        self._meter.observe(
            now,
            seconds=seconds,
            prefill_tokens=sum(tokens),
            prefill_pairs=sum(map(chunk_pairs, ends, tokens)),
            sampled_tokens=int(result.counts.sum()),
            stored_s=result.transfer_s[0],
            loaded_s=result.transfer_s[1],
        )


def _chunks(submitted: _Submitted) -> tuple[list[int], list[int]]:
    """Of the rows that lacked more than a token, how many they ran, and how many were computed then."""
    plan = submitted.plan
    if submitted.num_tokens == np.count_nonzero(plan.samples):  # a token each, and it samples
        return [], []
    known = plan.num_new_tokens - plan.num_drafts if len(plan.num_drafts) else plan.num_new_tokens
    chunks = (known > 1) | ~plan.samples
    return ints(plan.num_new_tokens[chunks]), ints(submitted.ends[chunks])


def _pumps(offload: Offload | None, executor: Executor, keepers: Sequence[int]) -> list[Pump]:
    """Between the connectors and the ranks."""
    pumps: list[Pump] = []
    if offload is not None:
        pumps += [LowerPump(tier, executor, keepers) for tier in offload.lower]
    if offload is not None and offload.transfer is not None:
        pumps.append(TransferPump(offload.transfer, executor))
    return pumps
