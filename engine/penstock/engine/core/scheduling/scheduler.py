"""The scheduler: which rows run how many tokens in the next step.

There are no phases. A request is tokens known and tokens computed, and a step closes gaps between the two under one token budget:
running requests first, those that lack a single token as one array operation before the rest, then waiting ones. What is
planned counts as computed at once, drafts as accepted, so that the next step can be planned while this one runs; `update`
corrects that.

No torch, no clock, no input or output: time is an argument.
"""

from collections.abc import Iterable

from penstock.api.events import BlockStored, Event
from penstock.api.load_report import WaitingReason
from penstock.engine.cache.kv_manager import KVCacheManager, Prefix
from penstock.engine.config import ConfigError, PoolingConfig, SchedulerConfig
from penstock.engine.connectors.offload import Offload
from penstock.engine.core.plan import SampleInputs, StepPlan, StepResult
from penstock.engine.core.row_table import RowTable
from penstock.engine.core.scheduling.admission.admissions import Admissions
from penstock.engine.core.scheduling.admission.encoder_room import EncoderRoom
from penstock.engine.core.scheduling.admission.kv_blocks import KVBlocks
from penstock.engine.core.scheduling.admission.lora_slots import LoraSlots
from penstock.engine.core.scheduling.admission.max_num_seqs import MaxNumSeqs
from penstock.engine.core.scheduling.admission.rule import AdmissionRule
from penstock.engine.core.scheduling.admission.token_budget import TokenBudget
from penstock.engine.core.scheduling.grants import Grants
from penstock.engine.core.scheduling.guides import Guide
from penstock.engine.core.scheduling.images.encoder import Encoder
from penstock.engine.core.scheduling.images.encoder_cache import EncoderCache
from penstock.engine.core.scheduling.in_flight import InFlight
from penstock.engine.core.scheduling.lora.adapter import Adapter
from penstock.engine.core.scheduling.lora.adapter_table import AdapterTable
from penstock.engine.core.scheduling.lora.adapters import Adapters
from penstock.engine.core.scheduling.outputs import RequestOutputs
from penstock.engine.core.scheduling.pause import Closed, PauseState
from penstock.engine.core.scheduling.request_book import RequestBook
from penstock.engine.core.scheduling.retirement import Retirement
from penstock.engine.core.scheduling.step_builder import StepBuilder
from penstock.engine.core.scheduling.tenancy import Tenancy
from penstock.engine.core.scheduling.token_counters import TokenCounters
from penstock.engine.core.scheduling.totals import Totals
from penstock.engine.core.scheduling.waiting_room import WaitingRoom
from penstock.engine.core.vllm_events import BlockContents
from penstock.engine.messages import AddRequest, ExtendPrompt
from penstock.engine.stats import EncoderStats
from penstock.prompt.hashing import BlockHasher, ExtraKeys


class Scheduler:
    """All requests of one engine core, from arrival to end.

    Args:
        config: Limits of a step.
        max_model_len: Tokens of prompt and output together.
        kv: The cache, big enough for one request of that length.
        hasher: Names the cache's blocks.
        table: Where adapters are; None: there are none.
        pooling: Of requests that end with their prompts; None: they generate.
        offload: Pages in the host's memory; None: there are none.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        max_model_len: int,
        kv: KVCacheManager,
        hasher: BlockHasher,
        table: AdapterTable | None = None,
        pooling: PoolingConfig | None = None,
        offload: Offload | None = None,
    ) -> None:
        _check(config, max_model_len, kv)
        self.config = config
        self.kv = kv
        self.table = RowTable(config.max_num_seqs, max_model_len, kv.block_sizes)
        self.totals = Totals()
        self.pause_state = PauseState.UNPAUSED
        self.closed: Closed | None = None
        """Why no request is taken; None: they are."""
        adapter_table = table or AdapterTable()
        self.adapters = Adapters(adapter_table, kv)
        cache = EncoderCache(config.encoder_cache_size)
        self.encoder = Encoder(config.max_encoder_tokens, cache, whole=config.whole_images, ahead=config.image_lookahead)
        self.rules: list[AdmissionRule] = [
            MaxNumSeqs(config.max_num_seqs),
            TokenBudget(chunked=config.enable_chunked_prefill),
            # Before what counts blocks: whoever waits for an adapter must not hold up those who wait for nothing.
            LoraSlots(adapter_table),
            EncoderRoom(self.encoder),
            KVBlocks(kv),
        ]
        if offload is not None:
            self.rules.append(offload)
        self._offload = offload
        self._hasher = hasher
        self._max_model_len = max_model_len
        self._next_step_id = 0
        longest_prompt = max_model_len - (pooling is None)  # room for a token of output
        counters = TokenCounters(config.tenant_weights)
        self._waiting = waiting = WaitingRoom(counters)
        self._tenancy = tenancy = Tenancy(config.max_num_seqs, max_model_len)
        self._in_flight = in_flight = InFlight(tenancy, exclusive=config.pipeline_stages > 1)
        self._book = book = RequestBook(
            config,
            self.table,
            longest_prompt,
            max_model_len,
            kv,
            hasher,
            tenancy,
            waiting,
            counters,
            self.adapters,
            self.totals,
            self.encoder,
            offload,
        )
        self._grants = Grants(config, kv, self.table, tenancy, in_flight, book, self.encoder)
        computes_all = pooling is not None and pooling.computes_all
        self._admissions = Admissions(
            self.rules, kv, tenancy, waiting, adapter_table, book, self.encoder, computes_all=computes_all
        )
        self._retirement = Retirement(kv, self.table, tenancy, in_flight, book, hasher)

    # --- what there is to do ---

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return len(self._tenancy.running)

    @property
    def has_work(self) -> bool:
        """Whether the next plan might hold anything."""
        match self.pause_state:
            case PauseState.UNPAUSED:
                return (
                    bool(self._tenancy.running)
                    or self.encoder.is_busy
                    or self._waiting.is_ready
                    or (self._waiting.has_held and self.adapters.table.changed)
                    or (self._offload is not None and self._offload.has_errands)
                )
            case PauseState.PAUSED_NEW:
                return bool(self._tenancy.running)
            case PauseState.PAUSED_ALL:
                return False

    @property
    def is_stuck(self) -> bool:
        """True if a request runs or waits only for room, although no plan is in flight and the last one was empty."""
        return self.has_work and not self._in_flight and (bool(self._tenancy.running) or "capacity" in self.waiting())

    def waiting(self) -> dict[WaitingReason, int]:
        """Waiting requests by what they wait for. During a pause none of them waits for capacity."""
        reasons = self._waiting.reasons()
        if self.pause_state is not PauseState.UNPAUSED and "capacity" in reasons:
            reasons["paused"] = reasons.pop("capacity")
        return reasons

    def prefill_backlog(self) -> int:
        """Tokens known and not yet computed, of waiting and running requests; those that only decode have none."""
        gaps = self.table.num_tokens - self.table.num_computed
        return int(gaps[gaps > 1].sum()) + sum(len(request.token_ids) for request in self._waiting)

    # --- input ---

    def add(self, message: AddRequest, now: float) -> None:
        """Takes a request in. One that cannot be served ends at once with an error, which `take_outputs` tells.

        Args:
            message: The request.
            now: Unix time in seconds.

        Raises:
            ValueError: The index belongs to a request that lives.
        """
        self._book.add(message, now, self.closed)

    def extend(self, message: ExtendPrompt, now: float) -> None:
        """Takes in more of a prompt that is still arriving; of no effect where the request has ended."""
        self._book.extend(message, now)

    def indexes(self) -> list[int]:
        """Return all requests, in the order of arrival."""
        return self._book.indexes()

    def abort(self, indexes: Iterable[int]) -> None:
        """Ends requests in whatever state; unknown ones are ignored."""
        self._book.abort(indexes)

    def park(self, index: int, reason: WaitingReason, now: float) -> None:
        """Lets a waiting request stand aside until `unpark`: what it waits for is no room but a resource of its own.

        Raises:
            KeyError: No such request waits, or nothing is parked for this reason.
        """
        self._book.park(index, reason, now)

    def unpark(self, index: int, now: float) -> None:
        """What the request was parked for is there; of no effect where it has ended or was not parked."""
        self._book.unpark(index, now)

    def is_waiting(self, index: int) -> bool:
        """Whether the request is there and has not begun."""
        return self._book.is_waiting(index)

    def fail(self, index: int, error: str, code: str | None = None, param: str | None = None) -> None:
        """Ends a request with an error of its own; of no effect where it has ended.

        Args:
            index: The request.
            error: What is wrong.
            code: A word for machines; None: the engine is at fault.
            param: The request's field at fault.
        """
        self._book.fail(index, error, code, param)

    def guide(self, index: int, guide: Guide) -> None:
        """Has a guide say what a waiting request may generate.

        Raises:
            KeyError: No such request waits, or it has begun.
        """
        self._book.guide(index, guide)

    def fail_adapter(self, adapter: Adapter, error: str) -> None:
        """Ends the requests that wait for an adapter which cannot be had."""
        self._book.fail_adapter(adapter, error)

    def fail_all(self, error: str, code: str) -> None:
        """Ends every request with an error that another replica may not have."""
        self._book.fail_all(error, code)

    def pin_prefix(self, name: str, token_ids: list[int], extra: ExtraKeys) -> int:
        """See `KVCacheManager.pin_prefix`; a request of full length must still find room."""
        return self.kv.pin_prefix(name, Prefix(self._hasher.hash(token_ids, extra)), self.kv.blocks_for(self._max_model_len))

    def preempt_all(self, now: float) -> None:
        """Takes every row, block and slot; the requests wait, and lose nothing but time. No plan may be in flight: its tokens
        would be lost."""
        while self._tenancy.running:
            self._book.preempt(self._tenancy.running[-1], now)
        self.adapters.table.empty_slots()

    # --- the step ---

    def schedule(self, now: float, *, idle: bool = False) -> StepPlan | None:
        """Plans the next step; None where no row can run.

        Args:
            now: Unix time in seconds.
            idle: A plan without rows is wanted, too: a rank keeps step with others that have some.
        """
        self._book.expire(now)
        if self.pause_state is PauseState.PAUSED_ALL:
            return None
        step = StepBuilder(self.config, now)
        self.encoder.begin()
        if self._offload is not None:
            self._offload.store()
        self._grants.grant(step)
        if not step.preempted and self.pause_state is PauseState.UNPAUSED:
            self._admissions.admit(step)
        if self._offload is not None:
            # The rows that this plan lacks may be in another stage: copies at once would hold them up when they come back.
            alone = self.config.pipeline_stages == 1 or not self._in_flight
            idle = idle or (alone and self._offload.has_errands)
        return None if step.is_empty and not idle and not self.encoder.is_busy else self._submit(step)

    def _submit(self, step: StepBuilder) -> StepPlan:
        adapters = self.adapters.table
        step.lora_loads, step.lora_drops = adapters.take_loads(), adapters.take_drops()
        transfers = None
        if self._offload is not None:
            transfers = self._offload.take(self._next_step_id, step.num_prefill_tokens, len(step.decodes))
        encoder = self.encoder.take_plan()
        plan = step.build(self._next_step_id, self._book.take_released(), self.kv.num_groups, transfers, encoder)
        self._next_step_id += 1
        self.table.apply(plan)
        if self.config.num_speculative_tokens:
            # Drafts after the tokens of this step, should the next one be planned before its result is there.
            if not self.config.drafts_after_result:
                self._tenancy.propose(plan.rows[plan.samples], self.config.num_speculative_tokens)
            elif self._tenancy.has_proposed:
                self._tenancy.propose(plan.rows[plan.samples], 0)
        self._in_flight.submit(plan)
        return plan

    @property
    def is_masked(self) -> bool:
        """Whether the plan made last has rows that sample under a mask."""
        return self._in_flight.is_masked

    @property
    def awaits_masks(self) -> bool:
        """Whether the plan made last cannot be sampled before the result of the one before it has been taken in."""
        return self._in_flight.awaits_masks

    @property
    def awaits_drafts(self) -> bool:
        """Whether the next plan is to wait for the result of the one in flight, as its drafts come with that."""
        return self._retirement.brought_drafts and self.config.drafts_after_result and len(self._in_flight) > 0

    def sample_inputs(self) -> SampleInputs:
        """Return the inputs for sampling the last plan. Not allowed while `awaits_masks`."""
        return self._in_flight.sample_inputs()

    # --- the result ---

    def update(self, result: StepResult, now: float) -> RequestOutputs:
        """Takes in what the oldest plan in flight produced. What it holds for requests that have left since is ignored.

        Args:
            result: The step's.
            now: Unix time in seconds.

        Raises:
            ValueError: The result is another step's.
        """
        flight = self._in_flight.retire()
        if flight.plan.step_id != result.step_id:
            raise ValueError(f"the result of step {result.step_id} came while step {flight.plan.step_id} was awaited")
        if self._offload is not None:
            self._offload.retire(result.step_id, self._book, now, result.transfer_s)
        self.encoder.seconds += result.encoder_s
        return self._retirement.take(flight, result, now)

    def fail_step(self, error: str, code: str, now: float) -> RequestOutputs:
        """Takes in that the oldest plan in flight came to nothing: its requests end with an error, and what it copied is void.
        `now` is Unix time in seconds."""
        flight = self._in_flight.retire()
        if self._offload is not None:
            self._offload.retire(flight.plan.step_id, self._book, now, None)
        self.encoder.failed(flight.plan.encoder_runs)
        return self._retirement.fail(flight, error, code)

    # --- what there is to tell ---

    def take_outputs(self) -> RequestOutputs:
        """What happened outside of steps: aborts and refusals."""
        return self._book.take_outputs()

    def take_events(self) -> list[Event]:
        """Events for the stream since the last call: blocks, then requests that ended."""
        return [*self.kv.events.take(), *self._book.take_ended()]

    def encoder_stats(self) -> EncoderStats | None:
        """What became of images; None: there can be none."""
        computed = self.table.num_computed
        return self.encoder.stats((it, int(computed[it.row]) if it.row >= 0 else 0) for it in self._book.live() if it.images)

    def record_contents(self) -> BlockContents:
        """Have the content of blocks recorded from now on, for who publishes it: take it out with each `take_events`."""
        self._retirement.contents = contents = BlockContents(self.kv.block_size)
        return contents

    def cached_blocks(self) -> list[BlockStored]:
        """All blocks that can be found now, as the events have said: first what lies in tiers."""
        return [*(self._offload.copies() if self._offload is not None else ()), BlockStored(list(self.kv.cached_hashes()))]


def _check(config: SchedulerConfig, max_model_len: int, kv: KVCacheManager) -> None:
    """Raises `ConfigError` where a request of full length could never run."""
    usable, needed = kv.num_blocks, kv.blocks_for(max_model_len)
    if usable < needed:
        raise ConfigError(
            f"a sequence of --max-model-len {max_model_len} needs {needed} KV blocks of {kv.block_size} tokens, and there "
            f"are {usable}: lower --max-model-len to {kv.longest(max_model_len)}, or give the cache more memory"
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"--no-enable-chunked-prefill computes a prompt in one step: --max-num-batched-tokens must be at least the "
            f"context of {max_model_len} tokens, not {config.max_num_batched_tokens}"
        )
    if not config.enable_chunked_prefill and config.long_prefill_token_threshold:
        raise ConfigError("--long-prefill-token-threshold cuts prompts into chunks: it needs --enable-chunked-prefill")
