"""The scheduler: which rows run how many tokens in the next step.

There are no phases. A request is tokens known and tokens computed, and a step closes gaps between the two under one token budget:
running requests first, those that lack a single token as one array operation before the rest, then waiting ones. What is
planned counts as computed at once, so that the next step can be planned while this one runs; `update` corrects that.

No torch, no clock, no input or output: time is an argument.
"""

from collections import deque
from collections.abc import Iterable

import msgspec
import numpy as np

from penstock.api.events import Event
from penstock.api.load_report import WaitingReason
from penstock.engine.cache.kv_manager import KVCacheManager, Prefix
from penstock.engine.config import ConfigError, PoolingConfig, SchedulerConfig
from penstock.engine.core.plan import Admission, Bool, Int32, Int64, Pooled, StepPlan, StepResult, ints
from penstock.engine.core.row_table import RowTable
from penstock.engine.core.scheduling.admission.kv_blocks import KVBlocks
from penstock.engine.core.scheduling.admission.lora_slots import LoraSlots
from penstock.engine.core.scheduling.admission.max_num_seqs import MaxNumSeqs
from penstock.engine.core.scheduling.admission.rule import AdmissionRule, Candidate
from penstock.engine.core.scheduling.admission.token_budget import TokenBudget
from penstock.engine.core.scheduling.lora.adapter import Adapter
from penstock.engine.core.scheduling.lora.adapter_table import AdapterTable
from penstock.engine.core.scheduling.outputs import RequestOutputs, logprob_columns, pooled_columns, prompt_logprob_columns
from penstock.engine.core.scheduling.pause import Closed, PauseState
from penstock.engine.core.scheduling.request import Request, RequestStatus
from penstock.engine.core.scheduling.request_book import RequestBook
from penstock.engine.core.scheduling.step_draft import StepDraft
from penstock.engine.core.scheduling.waits import Waits
from penstock.engine.messages import AddRequest, ExtendPrompt, FinishReason, LifecycleEvent
from penstock.prompt.hashing import BlockHasher, ExtraKeys


class Flight(msgspec.Struct, frozen=True):
    """A plan whose result is still to come, and who had its rows when it was made."""

    step_id: int
    rows: Int32
    starts: Int32
    """[r]: position of each row's first new token."""
    ends: Int32
    """[r]: and the one after its last: where its sampled token belongs."""
    tenancies: Int64


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
            self._preempt(StepDraft(0, now), self._tenancy.running[-1])
        self._table.empty_slots()

    # --- the step ---

    def schedule(self, now: float) -> StepPlan | None:
        """Plans the next step; None where no row can run. `now` is Unix time in seconds."""
        self._book.expire(now)
        if self.pause_state is PauseState.PAUSED_ALL:
            return None
        draft = StepDraft(self.config.max_num_batched_tokens, now)
        rows = self._tenancy.rows()
        known = self.table.num_tokens[rows]
        gaps = known - self.table.num_computed[rows]
        # A row at its limit ends when the token in flight is known: that token needs no step of its own.
        self._schedule_decodes(draft, rows[(gaps == 1) & (known < self._tenancy.limits[rows])])
        self._schedule_chunks(draft, rows[gaps > 1])
        if not draft.preempted and self.pause_state is PauseState.UNPAUSED:
            self._schedule_waiting(draft)
        return None if draft.is_empty else self._submit(draft)

    def _schedule_decodes(self, draft: StepDraft, rows: Int32) -> None:
        draft.grant_decodes(rows)
        # Only a row whose blocks are all full needs another one.
        crossing = draft.decodes[self.table.num_computed[draft.decodes] % self.kv.block_size == 0]
        for row in ints(crossing):
            if request := self._tenancy.requests[row]:
                self._grow(draft, request, int(self.table.num_computed[row]) + 1)

    def _schedule_chunks(self, draft: StepDraft, rows: Int32) -> None:
        for row in ints(rows):
            request = self._tenancy.requests[row]
            if draft.token_budget == 0:
                return
            if request is None:  # preempted in this step
                continue
            computed, known = int(self.table.num_computed[row]), int(self.table.num_tokens[row])
            count = self._chunk(known - computed, draft.token_budget)
            if self._grow(draft, request, computed + count):
                draft.grant_chunk(row, count, samples=computed + count == known)
                draft.reserved_blocks += self.kv.blocks_for(known) - self.kv.blocks_for(computed + count)

    def _schedule_waiting(self, draft: StepDraft) -> None:
        if self._table.begin(draft.now):
            self._waiting.release_held(draft.now)
        while self._waiting.is_ready:
            candidate = Candidate(
                self._waiting.peek(),
                self.kv,
                num_running=self.num_running,
                token_budget=draft.token_budget,
                reserved_blocks=draft.reserved_blocks,
                now=draft.now,
                computes_all=self._computes_all,
            )
            reason = self._why_not(candidate)
            if reason is None:
                self._admit(draft, candidate)
            elif reason == "capacity":
                candidate.request.wait_for(reason, draft.now)
                break
            elif candidate.request.adapter is not None and reason == "lora":
                self._waiting.hold(candidate.request, reason, draft.now)
            else:
                self._waiting.set_aside(candidate.request, reason, draft.now)
        self._waiting.restore()

    def _why_not(self, candidate: Candidate) -> WaitingReason | None:
        for rule in self.rules:
            if (reason := rule.refuses(candidate)) is not None:
                return reason
        return None

    def _chunk(self, gap: int, budget: int) -> int:
        threshold = self.config.long_prefill_token_threshold
        return min(gap, budget, threshold) if threshold else min(gap, budget)

    def _admit(self, draft: StepDraft, candidate: Candidate) -> None:
        request, hit, known = candidate.request, candidate.hit, candidate.num_tokens
        self._waiting.remove(request)
        count = self._chunk(known - hit.num_tokens, draft.token_budget)
        blocks = self.kv.allocate(request, hit.num_tokens + count, hit)
        assert blocks is not None, "the admission rule counted blocks that are not there"
        row = self._tenancy.move_in(request, self._book.counters.slot(request.tenant))
        if not request.has_started:
            self._book.counters.charge_prompt(request.tenant, known - hit.num_tokens)
            request.num_cached_tokens = hit.num_tokens
            self.prefix_queries += known
            self.prefix_hits += hit.num_tokens
            self._journal.started(request)
            request.wait_for("capacity", draft.now)
            self.waits.started(request.waited)
        else:
            self.resumed_cached_tokens += hit.num_tokens
        self._journal.note(request, LifecycleEvent.SCHEDULED, draft.now)
        tokens = np.array(request.token_ids, np.int32)
        slot = -1 if request.adapter is None else self._table.move_in(request.adapter, draft.now)
        draft.admissions.append(Admission(row, tokens, request.num_prompt_tokens, hit.num_tokens, request.sampling, slot))
        draft.appends[row] = blocks
        draft.grant_chunk(row, count, samples=hit.num_tokens + count == known)
        draft.reserved_blocks += self.kv.blocks_for(known) - self.kv.blocks_for(hit.num_tokens + count)

    def _grow(self, draft: StepDraft, request: Request, num_tokens: int) -> bool:
        """Makes room for a running request's tokens, at the cost of those served after it; False: at its own."""
        while (blocks := self.kv.allocate(request, num_tokens)) is None:
            victim = self._tenancy.running[-1]
            self._preempt(draft, victim)
            if victim is request:
                return False
        draft.appends[request.row] = blocks
        return True

    def _preempt(self, draft: StepDraft, request: Request) -> None:
        """Takes a request's row and blocks; it keeps its tokens and computes them anew when there is room."""
        row = request.row
        draft.take_back(row)
        self.preempted_tokens += int(self.table.num_computed[row])
        # A token in flight is not known here: it is sampled again, from the same counter of random numbers.
        request.token_ids = self.table.token_ids[row, : self._tenancy.num_known[row]].tolist()
        if self.kv.enable_prefix_caching:
            request.extend_hashes(self._hasher, request.token_ids)
        self._book.release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._journal.note(request, LifecycleEvent.PREEMPTED, draft.now)
        self._waiting.push(request, draft.now)

    def _submit(self, draft: StepDraft) -> StepPlan:
        draft.lora_loads, draft.lora_drops = self._table.take_loads(), self._table.take_drops()
        plan = draft.build(self._next_step_id, self._book.take_released(), self.kv.num_groups)
        self._next_step_id += 1
        starts = self.table.apply(plan)
        tenancies = self._tenancy.tenancies[plan.rows]
        self._in_flight.append(Flight(plan.step_id, plan.rows, starts, starts + plan.num_new_tokens, tenancies))
        return plan

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
        if flight.step_id != result.step_id:
            raise ValueError(f"the result of step {result.step_id} came while step {flight.step_id} was awaited")
        live = self._tenancy.tenancies[flight.rows] == flight.tenancies
        not_finite = set(ints(result.not_finite))
        for at, error in result.failed.items():
            if live[at] and (request := self._tenancy.requests[int(flight.rows[at])]):
                live[at] = False
                # A request may also fail by what its client asked for, and then the prefix that it shares is as good as ever.
                if at in not_finite:
                    self.kv.invalidate(request)
                self._book.finish(request, FinishReason.ERROR, error=error)
        prompt_logprobs = prompt_logprob_columns(result.prompt_logprobs, live, self._tenancy.indexes[flight.rows])
        pooled = pooled_columns(result.pooled, live, self._tenancy.indexes[flight.rows])
        self._commit(flight, live)
        self._end_pooled(result.pooled, flight, live)
        accepted = live & (result.counts > 0)
        rows, positions, tokens = flight.rows, flight.ends, result.token_ids[:, 0]
        if np.count_nonzero(accepted) < len(accepted):
            rows, positions, tokens = rows[accepted], positions[accepted], tokens[accepted]
        indexes = self._tenancy.indexes[rows]
        self._book.counters.charge_outputs(self._tenancy.slots[rows])
        self.table.write_sampled(rows, positions, tokens)
        self._tenancy.num_known[rows] = positions + 1
        for request in self._tenancy.begun(rows, positions):
            request.first_token_at = now
        for request, reason, stop_token_id in self._tenancy.endings(rows, tokens, self.table.token_ids):
            self._book.finish(request, reason, stop_token_id=stop_token_id)
        return self._journal.take(indexes, tokens, logprob_columns(result.logprobs, accepted), prompt_logprobs, pooled)

    def fail_step(self, error: str, code: str) -> RequestOutputs:
        """Takes in that the oldest plan in flight came to nothing: its requests end with an error."""
        flight = self._in_flight.popleft()
        live = self._tenancy.tenancies[flight.rows] == flight.tenancies
        for row in ints(flight.rows[live]):
            if request := self._tenancy.requests[row]:
                self._book.finish(request, FinishReason.ERROR, error=error, code=code)
        return self._journal.take()

    def _end_pooled(self, pooled: Pooled | None, flight: Flight, live: Bool) -> None:
        """Ends the requests whose embeddings are there."""
        for at in [] if pooled is None else ints(pooled.plan_rows):
            if live[at] and (request := self._tenancy.requests[int(flight.rows[at])]):
                self._book.finish(request, FinishReason.STOP)

    def _commit(self, flight: Flight, live: Bool) -> None:
        """Publishes the blocks that this step has filled, and gives back those that windows have left behind."""
        if not self.kv.needs_commits:
            return
        size = self.kv.block_size
        for at in (live & (flight.ends // size > flight.starts // size)).nonzero()[0].tolist():
            row, upto = int(flight.rows[at]), int(flight.ends[at])
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
