"""The scheduler: which rows run how many tokens in the next step.

There are no phases. A request is tokens known and tokens computed, and a step closes gaps between the two under one token budget:
running requests first, those that lack a single token as one array operation before the rest, then waiting ones. What is
planned counts as computed at once, drafts as accepted, so that the next step can be planned while this one runs; `update`
corrects that.

No torch, no clock, no input or output: time is an argument.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from penstock.api.events import Event
from penstock.api.load_report import WaitingReason
from penstock.engine.cache.kv_manager import KVCacheManager, Prefix
from penstock.engine.config import ConfigError, PoolingConfig, SchedulerConfig
from penstock.engine.core.plan import NONE, Admission, Bool, Int32, Int64, Pooled, SampleInputs, StepPlan, StepResult, ints
from penstock.engine.core.row_table import RowTable, first_of
from penstock.engine.core.scheduling.admission.kv_blocks import KVBlocks
from penstock.engine.core.scheduling.admission.lora_slots import LoraSlots
from penstock.engine.core.scheduling.admission.max_num_seqs import MaxNumSeqs
from penstock.engine.core.scheduling.admission.rule import AdmissionRule, Candidate
from penstock.engine.core.scheduling.admission.token_budget import TokenBudget
from penstock.engine.core.scheduling.guides import Guide, told_drafts
from penstock.engine.core.scheduling.lora.adapter import Adapter
from penstock.engine.core.scheduling.lora.adapter_table import AdapterTable
from penstock.engine.core.scheduling.outputs import (
    RequestOutputs,
    Tokens,
    logprob_columns,
    offsets_of,
    pooled_columns,
    prompt_logprob_columns,
)
from penstock.engine.core.scheduling.pause import Closed, PauseState
from penstock.engine.core.scheduling.request import Request, RequestStatus
from penstock.engine.core.scheduling.request_book import RequestBook
from penstock.engine.core.scheduling.step_builder import StepBuilder
from penstock.engine.core.scheduling.tenancy import Ending
from penstock.engine.core.scheduling.waits import Waits
from penstock.engine.messages import AddRequest, ExtendPrompt, FinishReason, LifecycleEvent
from penstock.prompt.hashing import BlockHasher, ExtraKeys


class Flight(msgspec.Struct, frozen=True):
    """A plan whose result is still to come, and who had its rows when it was made."""

    plan: StepPlan
    tenancies: Int64
    masked: Int32
    """[g]: indexes of its rows that sample under a mask."""


class Scheduler:
    """All requests of one engine core, from arrival to end.

    Args:
        config: Limits of a step.
        max_model_len: Tokens of prompt and output together.
        kv: The cache, big enough for one request of that length.
        hasher: Names the cache's blocks.
        table: Where adapters are; None: there are none.
        pooling: Of requests that end with their prompts; None: they generate.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        max_model_len: int,
        kv: KVCacheManager,
        hasher: BlockHasher,
        table: AdapterTable | None = None,
        pooling: PoolingConfig | None = None,
    ) -> None:
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
        self.config = config
        self.table = RowTable(config.max_num_seqs, max_model_len, kv.block_sizes)
        self.kv = kv
        self._table = table or AdapterTable()
        self.rules: list[AdmissionRule] = [
            MaxNumSeqs(config.max_num_seqs),
            TokenBudget(chunked=config.enable_chunked_prefill),
            # Before what counts blocks: whoever waits for an adapter must not hold up those who wait for nothing.
            LoraSlots(self._table),
            KVBlocks(kv),
        ]
        self.pause_state = PauseState.UNPAUSED
        self.closed: Closed | None = None
        """Why no request is taken; None: they are."""
        self.waits = Waits()
        """Of requests that have run."""
        self.num_preemptions = 0
        self.preempted_tokens = 0
        """Computed tokens of requests at the moment when they were preempted."""
        self.resumed_cached_tokens = 0
        """Of those, found in the prefix cache when the requests ran again: only the rest is computed twice."""
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._hasher = hasher
        self._max_model_len = max_model_len
        self._computes_all = pooling is not None and pooling.computes_all
        longest_prompt = max_model_len - (pooling is None)  # room for a token of output
        self._book = RequestBook(config, max_model_len, longest_prompt, kv, hasher, self._table)
        self.adapters = self._book.adapters
        self._tenancy = self._book.tenancy
        self._waiting = self._book.waiting
        self._journal = self._book.journal
        self._in_flight: deque[Flight] = deque()
        self._next_step_id = 0

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
                return bool(self._tenancy.running) or self._waiting.is_ready or (self._waiting.has_held and self._table.changed)
            case PauseState.PAUSED_NEW:
                return bool(self._tenancy.running)
            case PauseState.PAUSED_ALL:
                return False

    @property
    def is_stuck(self) -> bool:
        """Whether, though no plan is in flight and the last one held nothing, somebody runs or waits for nothing but room."""
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
        """Of all requests, in the order in which they came."""
        return list(self._book.live)

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
        return (request := self._book.live.get(index)) is not None and not request.has_started

    def fail(self, index: int, error: str, code: str | None = None, param: str | None = None) -> None:
        """Ends a request with an error of its own; of no effect where it has ended.

        Args:
            index: The request.
            error: What is wrong.
            code: A word for machines; None: the engine is at fault.
            param: The request's field at fault.
        """
        if (request := self._book.live.get(index)) is not None:
            self._book.finish(request, FinishReason.ERROR, error=error, code=code, param=param)

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
        """See `KVCacheManager.pin`; a request of full length must still find room."""
        return self.kv.pin(name, Prefix(self._hasher.hash(token_ids, extra)), self.kv.blocks_for(self._max_model_len))

    def preempt_all(self, now: float) -> None:
        """Takes every row, block and slot; the requests wait, and lose nothing but time. No plan may be in flight: its tokens
        would be lost."""
        while self._tenancy.running:
            self._preempt(StepBuilder(0, now), self._tenancy.running[-1])
        self._table.empty_slots()

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
        step = StepBuilder(self.config.max_num_batched_tokens, now)
        rows = self._tenancy.rows()
        known = self.table.num_tokens[rows]
        gaps = known - self.table.num_computed[rows]
        # A row at its limit ends when the tokens in flight are known: they need no step of their own.
        self._schedule_decodes(step, rows[(gaps == 1) & (known < self._tenancy.limits[rows])])
        self._schedule_chunks(step, rows[gaps > 1])
        if not step.preempted and self.pause_state is PauseState.UNPAUSED:
            self._schedule_waiting(step)
        return None if step.is_empty and not idle else self._submit(step)

    def _schedule_decodes(self, step: StepBuilder, rows: Int32) -> None:
        self._grant_decodes(step, rows)
        rows = step.decodes
        own = ends = self.table.num_computed[rows] + 1
        if step.num_drafts is not None:
            ends = own + step.num_drafts
        if lookahead := self.config.num_lookahead_tokens:
            ends = np.maximum(np.minimum(ends + lookahead, self._max_model_len), own)
        # Only a row whose blocks are all full needs another one.
        crossing = (ends > self.table.room[rows]).nonzero()[0]
        if not len(crossing):
            return
        for row, one, end in zip(ints(rows[crossing]), ints(own[crossing]), ints(ends[crossing]), strict=True):
            if request := self._tenancy.requests[row]:
                self._grow(step, request, one, end - one)

    def _grant_decodes(self, step: StepBuilder, rows: Int32) -> None:
        """A token for each, and its drafts as far as it may still grow."""
        guides = self._tenancy.guides
        if not (self.config.num_speculative_tokens or guides):
            step.grant_decodes(rows)
            return
        if guides:
            # What is forced follows the last token of all, which a row in flight does not have yet.
            ready = np.array([guides.forced(row) is None for row in ints(rows)], np.bool_)
            rows = rows[ready | ~self._is_in_flight(rows)]
        wanted = self._tenancy.num_proposed[rows]
        for at, row in enumerate(ints(rows) if guides else ()):
            if (forced := guides.forced(row)) is not None:
                wanted[at], step.draft_ids[row] = len(forced), forced
        step.grant_decodes(rows, np.minimum(wanted, self._tenancy.limits[rows] - self.table.num_tokens[rows] - 1))

    def _is_in_flight(self, rows: Int32) -> Bool:
        """[m]: which rows' requests have a plan in flight."""
        if not self._in_flight:
            return np.zeros(len(rows), np.bool_)
        return np.isin(self._tenancy.tenancies[rows], np.concatenate([flight.tenancies for flight in self._in_flight]))

    def _schedule_chunks(self, step: StepBuilder, rows: Int32) -> None:
        for row in ints(rows):
            request = self._tenancy.requests[row]
            if step.token_budget == 0:
                return
            if request is None:  # preempted in this step
                continue
            computed, known = int(self.table.num_computed[row]), int(self.table.num_tokens[row])
            count = self._chunk(known - computed, step.token_budget)
            if self._grow(step, request, computed + count):
                step.grant_chunk(row, count, samples=computed + count == known)
                step.reserved_blocks += self.kv.blocks_for(known) - self.kv.blocks_for(computed + count)

    def _schedule_waiting(self, step: StepBuilder) -> None:
        if self._table.begin(step.now):
            self._waiting.release_held(step.now)
        while self._waiting.is_ready:
            candidate = Candidate(
                self._waiting.peek(),
                self.kv,
                num_running=self.num_running,
                token_budget=step.token_budget,
                reserved_blocks=step.reserved_blocks,
                now=step.now,
                computes_all=self._computes_all,
            )
            reason = self._why_not(candidate)
            if reason is None:
                self._admit(step, candidate)
            elif reason == "capacity":
                candidate.request.wait_for(reason, step.now)
                break
            elif candidate.request.adapter is not None and reason == "lora":
                self._waiting.hold(candidate.request, reason, step.now)
            else:
                self._waiting.set_aside(candidate.request, reason, step.now)
        self._waiting.restore()

    def _why_not(self, candidate: Candidate) -> WaitingReason | None:
        for rule in self.rules:
            if (reason := rule.refuses(candidate)) is not None:
                return reason
        return None

    def _chunk(self, gap: int, budget: int) -> int:
        threshold = self.config.long_prefill_token_threshold
        return min(gap, budget, threshold) if threshold else min(gap, budget)

    def _admit(self, step: StepBuilder, candidate: Candidate) -> None:
        request, hit, known = candidate.request, candidate.hit, candidate.num_tokens
        self._waiting.remove(request)
        count = self._chunk(known - hit.num_tokens, step.token_budget)
        blocks = self.kv.allocate(request, hit.num_tokens + count, hit)
        assert blocks is not None, "the admission rule counted blocks that are not there"
        row = self._tenancy.move_in(request, self._book.counters.slot(request.tenant))
        if not request.has_started:
            self._book.counters.charge_prompt(request.tenant, known - hit.num_tokens)
            request.num_cached_tokens = hit.num_tokens
            self.prefix_queries += known
            self.prefix_hits += hit.num_tokens
            self._journal.started(request)
            request.wait_for("capacity", step.now)
            self.waits.started(request.waited)
        else:
            self.resumed_cached_tokens += hit.num_tokens
        self._journal.note(request, LifecycleEvent.SCHEDULED, step.now)
        tokens = np.array(request.token_ids, np.int32)
        slot = -1 if request.adapter is None else self._table.move_in(request.adapter, step.now)
        sampling, guided = request.sampling, request.guide is not None
        step.admissions.append(Admission(row, tokens, request.num_prompt_tokens, hit.num_tokens, sampling, slot, guided))
        step.appends[row] = blocks
        step.grant_chunk(row, count, samples=hit.num_tokens + count == known)
        step.reserved_blocks += self.kv.blocks_for(known) - self.kv.blocks_for(hit.num_tokens + count)

    def _grow(self, step: StepBuilder, request: Request, num_tokens: int, beyond: int = 0) -> bool:
        """Makes room for a running request's tokens, at the cost of those served after it; False: at its own. What is beyond,
        drafts and those that a draft model will propose, is worth no other request's place."""
        blocks = self.kv.allocate(request, num_tokens + beyond)
        if blocks is None and beyond:
            step.take_back_drafts(request.row)
            blocks = self.kv.allocate(request, num_tokens)
        while blocks is None:
            victim = self._tenancy.running[-1]
            self._preempt(step, victim)
            if victim is request:
                return False
            blocks = self.kv.allocate(request, num_tokens)
        step.appends[request.row] = blocks
        return True

    def _preempt(self, step: StepBuilder, request: Request) -> None:
        """Takes a request's row and blocks; it keeps its tokens and computes them anew when there is room."""
        row = request.row
        step.take_back(row)
        self.preempted_tokens += int(self.table.num_computed[row])
        # A token in flight is not known here: it is sampled again, from the same counter of random numbers.
        request.token_ids = self.table.token_ids[row, : self._tenancy.num_known[row]].tolist()
        if self.kv.enable_prefix_caching:
            request.extend_hashes(self._hasher, request.token_ids)
        self._book.release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._journal.note(request, LifecycleEvent.PREEMPTED, step.now)
        self._waiting.push(request, step.now)

    def _submit(self, step: StepBuilder) -> StepPlan:
        step.lora_loads, step.lora_drops = self._table.take_loads(), self._table.take_drops()
        plan = step.build(self._next_step_id, self._book.take_released(), self.kv.num_groups)
        self._next_step_id += 1
        self.table.apply(plan)
        if self.config.num_speculative_tokens:
            self._tenancy.num_proposed[plan.rows[plan.samples]] = self.config.num_speculative_tokens
        masked = self._tenancy.guides.masked(plan) if self._tenancy.guides else NONE
        self._in_flight.append(Flight(plan, self._tenancy.tenancies[plan.rows], masked))
        return plan

    @property
    def awaits_masks(self) -> bool:
        """Whether the plan made last cannot be sampled before the result of the one before it has been taken in."""
        return len(self._in_flight) > 1 and len(self._in_flight[-1].masked) > 0

    def sample_inputs(self) -> SampleInputs:
        """For the sampling of the plan made last; not while `awaits_masks`."""
        flight = self._in_flight[-1]
        return self._tenancy.guides.inputs(flight.plan, flight.masked, self._is_live(flight))

    # --- the result ---

    def update(self, result: StepResult, now: float) -> RequestOutputs:
        """Takes in what the oldest plan in flight produced. What it holds for requests that have left since is ignored.

        Args:
            result: The step's.
            now: Unix time in seconds.

        Raises:
            ValueError: The result is another step's.
        """
        flight = self._in_flight.popleft()
        plan = flight.plan
        if plan.step_id != result.step_id:
            raise ValueError(f"the result of step {result.step_id} came while step {plan.step_id} was awaited")
        live = self._is_live(flight)
        self._end_failed(result, plan, live)
        indexes = self._tenancy.indexes
        prompt_logprobs = prompt_logprob_columns(result.prompt_logprobs, live, indexes, plan.rows)
        pooled = pooled_columns(result.pooled, live, indexes, plan.rows)
        starts, ends = self.table.settle(plan, result.counts, live)
        tokens, endings = self._take_tokens(result, plan, live, ends, now)
        # What follows a request's last token is nobody's, and is not to be found.
        self._commit(plan, live, starts, ends - (result.counts - tokens.counts) if endings else ends)
        self._take_drafts(result, plan, tokens, endings)
        self._end_pooled(result.pooled, plan, live)
        for request, reason, stop_token_id, error, stop_reason in endings:
            self._book.finish(request, reason, stop_token_id=stop_token_id, error=error, stop_reason=stop_reason)
        return self._journal.take(tokens, logprob_columns(result.logprobs, tokens.counts), prompt_logprobs, pooled)

    def _is_live(self, flight: Flight) -> Bool:
        """[r]: which of a plan's rows are still its requests'."""
        return self._tenancy.tenancies[flight.plan.rows] == flight.tenancies

    def _end_failed(self, result: StepResult, plan: StepPlan, live: Bool) -> None:
        for at, error in result.failed.items():
            if live[at] and (request := self._tenancy.requests[int(plan.rows[at])]):
                live[at] = False
                # A request may also fail by what its client asked for, and then the prefix that it shares is as good as ever.
                if at in result.not_finite:
                    self.kv.invalidate(request)
                self._book.finish(request, FinishReason.ERROR, error=error)

    def _take_tokens(
        self, result: StepResult, plan: StepPlan, live: Bool, ends: Int32, now: float
    ) -> tuple[Tokens, list[Ending]]:
        """Writes the tokens of requests that are still there, up to those that end them."""
        rows, token_ids, counts = plan.rows, result.token_ids, result.counts
        given = live & (counts > 0)
        whole = np.count_nonzero(given) == len(given)
        if not whole:
            rows, token_ids, counts, ends = rows[given], token_ids[given], counts[given], ends[given]
        several = token_ids.shape[1] > 1
        firsts = ends - counts + 1 if several else ends
        self.table.write_tokens(rows, firsts, token_ids, counts)
        for request in self._tenancy.begun(rows, firsts):
            request.first_token_at = now
        kept, endings = self._tenancy.take(rows, firsts, token_ids, counts, self.table.token_ids)
        slots = self._tenancy.slots[rows]
        self._book.counters.charge_outputs(np.repeat(slots, kept) if several else slots)
        by_plan_row = kept
        if not whole:
            by_plan_row = np.zeros(len(given), np.int32)
            by_plan_row[given] = kept
        return Tokens(self._tenancy.indexes[rows], offsets_of(kept, several), first_of(token_ids, kept), by_plan_row), endings

    def _take_drafts(self, result: StepResult, plan: StepPlan, tokens: Tokens, endings: Sequence[Ending]) -> None:
        """What comes next in rows whose requests go on: as the runner proposes, and as guides allow."""
        tenancy = self._tenancy
        if self.config.num_speculative_tokens:
            goes_on = tokens.counts > 0
            # A row in flight has drafts by then that nobody has been told of.
            goes_on &= ~self._is_in_flight(plan.rows)
            proposed = 0 if result.drafts is None else (result.drafts[goes_on] >= 0).sum(axis=1)
            tenancy.num_proposed[plan.rows[goes_on]] = proposed
        if not tenancy.guides:
            return
        ended = {ending.request.row for ending in endings}
        for at in tokens.counts.nonzero()[0].tolist():
            if (row := int(plan.rows[at])) in tenancy.guides and row not in ended:
                tenancy.guides.look(row, told_drafts(result.drafts, at))

    def fail_step(self, error: str, code: str) -> RequestOutputs:
        """Takes in that the oldest plan in flight came to nothing: its requests end with an error."""
        flight = self._in_flight.popleft()
        for row in ints(flight.plan.rows[self._is_live(flight)]):
            if request := self._tenancy.requests[row]:
                self._book.finish(request, FinishReason.ERROR, error=error, code=code)
        return self._journal.take()

    def _end_pooled(self, pooled: Pooled | None, plan: StepPlan, live: Bool) -> None:
        """Ends the requests whose embeddings are there."""
        for at in [] if pooled is None else ints(pooled.plan_rows):
            if live[at] and (request := self._tenancy.requests[int(plan.rows[at])]):
                self._book.finish(request, FinishReason.STOP)

    def _commit(self, plan: StepPlan, live: Bool, starts: Int32, ends: Int32) -> None:
        """Publishes the blocks that this step has filled, and gives back those that windows have left behind."""
        if not self.kv.needs_commits:
            return
        size = self.kv.block_size
        for at in (live & (ends // size > starts // size)).nonzero()[0].tolist():
            row, upto = int(plan.rows[at]), int(ends[at])
            request = self._tenancy.requests[row]
            assert request is not None
            if self.kv.enable_prefix_caching:
                request.extend_hashes(self._hasher, self.table.token_ids[row, :upto].data)
            self.kv.commit(request, upto)

    # --- what there is to tell ---

    def take_outputs(self) -> RequestOutputs:
        """What happened outside of steps: aborts and refusals."""
        return self._journal.take()

    def take_events(self) -> list[Event]:
        """Events for the stream since the last call: blocks, then requests that ended."""
        return [*self.kv.events.take(), *self._journal.take_events()]
