"""Every live request, from arrival to end, whatever the steps do meanwhile."""

from collections.abc import Iterable

import numpy as np

from penstock.api.events import RequestFinished
from penstock.api.load_report import WaitingReason
from penstock.engine.cache.kv_manager import KVCacheManager
from penstock.engine.config import SchedulerConfig
from penstock.engine.connectors.offload import Offload
from penstock.engine.core.plan import Int32, Int64
from penstock.engine.core.row_table import RowTable
from penstock.engine.core.scheduling.deadlines import Deadlines
from penstock.engine.core.scheduling.guides import Guide
from penstock.engine.core.scheduling.images.encoder import Encoder
from penstock.engine.core.scheduling.journal import Journal
from penstock.engine.core.scheduling.lora.adapter import Adapter
from penstock.engine.core.scheduling.lora.adapters import Adapters
from penstock.engine.core.scheduling.outputs import RequestOutputs, Tokens
from penstock.engine.core.scheduling.pause import Closed
from penstock.engine.core.scheduling.request import Request, RequestStatus
from penstock.engine.core.scheduling.tenancy import Tenancy
from penstock.engine.core.scheduling.token_counters import TokenCounters
from penstock.engine.core.scheduling.totals import Totals
from penstock.engine.core.scheduling.waiting_room import WaitingRoom
from penstock.engine.messages import (
    ADAPTER_FAILED,
    ADAPTER_GONE,
    QUEUE_FULL,
    QUEUE_TIMEOUT,
    REQUEST_TIMEOUT,
    TENANT_QUEUE_FULL,
    TRANSFER_REFUSED,
    AddRequest,
    ExtendPrompt,
    Finished,
    FinishReason,
    LifecycleEvent,
    Logprobs,
    Pooled,
    PromptLogprobs,
)
from penstock.prompt.hashing import BlockHasher

_ERRORS = {
    QUEUE_FULL: "the engine's queue is full; try again later",
    TENANT_QUEUE_FULL: "your share of the engine's queue is used up; try again later",
    QUEUE_TIMEOUT: "the request's time was up before it could run",
    REQUEST_TIMEOUT: "the request's time was up before its answer was complete",
}


class RequestBook:
    """Each thing that can happen to a request is a verb, which keeps all that is known of requests consistent.

    Args:
        config: Limits of the queue.
        table: The running requests' tokens and progress.
        longest_prompt: Tokens of a prompt at most.
        max_model_len: Tokens of prompt and output together.
        kv: Holds the running requests' blocks.
        hasher: Names them.
        tenancy: Who has which row.
        waiting: Who has none.
        counters: What each tenant has had.
        adapters: What requests can ask for.
        totals: What is counted.
        encoder: Holds the embeddings of running requests' images.
        offload: Lends and reads pages; None: there are no tiers.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        table: RowTable,
        longest_prompt: int,
        max_model_len: int,
        kv: KVCacheManager,
        hasher: BlockHasher,
        tenancy: Tenancy,
        waiting: WaitingRoom,
        counters: TokenCounters,
        adapters: Adapters,
        totals: Totals,
        encoder: Encoder,
        offload: Offload | None = None,
    ) -> None:
        self._policy = config.policy
        self._max_num_waiting = config.max_num_waiting
        self._table = table
        self._longest_prompt = longest_prompt
        self._max_model_len = max_model_len
        self._kv = kv
        self._hasher = hasher
        self._tenancy = tenancy
        self._waiting = waiting
        self._counters = counters
        self._adapters = adapters
        self._totals = totals
        self._encoder = encoder
        self._offload = offload
        self._live: dict[int, Request] = {}
        self._journal = Journal()
        self._deadlines = Deadlines()
        self._released: list[int] = []
        self._ordinal = 0

    def indexes(self) -> list[int]:
        """Return all live requests, in the order of arrival."""
        return list(self._live)

    def live(self) -> Iterable[Request]:
        """Return the live requests themselves; for use before anything changes."""
        return self._live.values()

    def is_waiting(self, index: int) -> bool:
        """Whether the request is live and has not begun."""
        return (request := self._live.get(index)) is not None and not request.has_started

    # --- arrival ---

    def add(self, message: AddRequest, now: float, closed: Closed | None) -> None:
        """Takes a request in."""
        if message.index in self._live:
            raise ValueError(f"request {message.index} is there already")
        self._ordinal += 1
        adapter = self._adapters.serving(message.lora_id)
        request = Request(message, self._ordinal, adapter, now)
        if adapter is not None:
            self._adapters.joined(request)
        if self._counters.is_crowded:
            self._counters.prune(self._waiting.tenants, {other.tenant for other in self._live.values()})
        self._live[request.index] = request
        if message.remote is not None and self._offload is not None:
            self._offload.arrived(request, message.remote)
        self._waiting.push(request, now)
        if closed is not None:
            self.finish(request, FinishReason.ERROR, error=closed.error, code=closed.code)
        elif message.lora_id and adapter is None:
            self.finish(request, FinishReason.ERROR, error="the adapter has been unloaded", code=ADAPTER_GONE)
        elif not message.input_complete or self._accept_prompt(request):
            self._make_room(request)
        if request.status.is_finished:
            return
        self._deadlines.add(request)
        self._journal.note(request, LifecycleEvent.QUEUED, now)
        if not message.input_complete:
            self._waiting.park(request, "streaming", now)

    def extend(self, message: ExtendPrompt, now: float) -> None:
        """Takes in more of a prompt that is still arriving; of no effect where the request has ended."""
        request = self._live.get(message.index)
        if request is None:
            return
        if request.status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
            self.finish(request, FinishReason.ERROR, error="more of the prompt came after its last part")
            return
        request.extend_prompt(message.token_ids)
        if message.last or request.num_prompt_tokens > self._longest_prompt:
            self.unpark(request.index, now)

    def park(self, index: int, reason: WaitingReason, now: float) -> None:
        """Lets a waiting request stand aside until `unpark`: what it waits for is no room but a resource of its own."""
        request = self._live[index]
        if request.status is RequestStatus.RUNNING:
            raise KeyError(f"request {index} runs")
        self._waiting.park(request, reason, now)

    def unpark(self, index: int, now: float) -> None:
        """What the request was parked for is there; of no effect where it has ended or was not parked."""
        request = self._live.get(index)
        if request is None or not self._waiting.is_parked(request):
            return
        if request.has_started or self._accept_prompt(request):
            self._waiting.unpark(request, now)

    def guide(self, index: int, guide: Guide) -> None:
        """Has a guide say what a waiting request may generate."""
        request = self._live[index]
        if request.has_started:
            raise KeyError(f"request {index} has begun")
        request.guide = guide

    def _accept_prompt(self, request: Request) -> bool:
        """Whether a prompt that is complete can be served; a request whose prompt cannot ends here."""
        length, max_tokens = request.num_prompt_tokens, request.sampling.max_tokens
        if not length:
            self.finish(request, FinishReason.ERROR, error="the prompt has no tokens")
        elif max_tokens < 1:
            self.finish(request, FinishReason.ERROR, error=f"max_tokens is {max_tokens}; it must be at least 1")
        elif request.priority and self._policy == "fcfs":
            self.finish(request, FinishReason.ERROR, error="a priority needs --scheduling-policy priority")
        elif length > self._longest_prompt:
            error = f"the prompt has {length} tokens; the context is {self._max_model_len}, output included"
            self.finish(request, FinishReason.IGNORED, error=error)
        elif (problem := self._encoder.problem(request)) is not None:
            self.finish(request, FinishReason.ERROR, error=problem)
        elif self._kv.enable_prefix_caching:
            request.extend_hashes(self._hasher, request.token_ids)
            if self._offload is not None and (problem := self._offload.problem(request)) is not None:
                self.finish(request, FinishReason.ERROR, error=problem, code=TRANSFER_REFUSED, param="kv_transfer_params")
        return not request.status.is_finished

    def _make_room(self, newcomer: Request) -> None:
        """If more requests wait than may, end one of the tenant that has the most in the queue."""
        if len(self._waiting) - len(self._tenancy.free_rows) > self._max_num_waiting:
            code = TENANT_QUEUE_FULL if self._waiting.is_shared else QUEUE_FULL
            self.finish(self._waiting.one_too_many(newcomer), FinishReason.ERROR, error=_ERRORS[code], code=code)

    # --- between waiting and running ---

    def start(self, request: Request, num_cached_tokens: int, now: float) -> int:
        """A waiting request gets a row, which is returned, for the first time or again after a preemption.

        Args:
            request: It.
            num_cached_tokens: Of its tokens, those that the prefix cache supplies.
            now: Unix time in seconds.
        """
        self._waiting.remove(request)
        row = self._tenancy.move_in(request, self._counters.slot(request.tenant))
        if request.has_started:
            self._totals.resumed_cached_tokens += num_cached_tokens
        else:
            known = len(request.token_ids)
            self._counters.charge_prompt(request.tenant, known - num_cached_tokens)
            request.num_cached_tokens = num_cached_tokens
            self._totals.prefix_queries += known
            self._totals.prefix_hits += num_cached_tokens
            self._journal.started(request)
            request.wait_for("capacity", now)
            self._totals.waits.started(request.waited)
        self._journal.note(request, LifecycleEvent.SCHEDULED, now)
        return row

    def preempt(self, request: Request, now: float) -> None:
        """Take a running request's row and blocks. It keeps its tokens and computes them again when there is room."""
        row = request.row
        self._totals.preempted_tokens += int(self._table.num_computed[row])
        # A token in flight is not known here: it is sampled again, from the same counter of random numbers.
        request.token_ids = self._table.token_ids[row, : self._tenancy.num_known[row]].tolist()
        if self._kv.enable_prefix_caching:
            request.extend_hashes(self._hasher, request.token_ids)
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._totals.num_preemptions += 1
        self._journal.note(request, LifecycleEvent.PREEMPTED, now)
        self._waiting.push(request, now)

    def charge_outputs(self, rows: Int64, counts: Int32 | None) -> None:
        """Counts generated tokens against the tenants whose requests have the rows.

        Args:
            rows: [m].
            counts: [m]: tokens of each; None: one each.
        """
        slots = self._tenancy.slots[rows]
        self._counters.charge_outputs(slots if counts is None else np.repeat(slots, counts))

    def take_released(self) -> list[int]:
        """Return the rows released since the last call, for the next plan to report to the runner."""
        released, self._released = self._released, []
        return released

    # --- the end ---

    def abort(self, indexes: Iterable[int]) -> None:
        """Ends requests in whatever state; unknown ones are ignored."""
        for index in indexes:
            if request := self._live.get(index):
                self.finish(request, FinishReason.ABORT)

    def expire(self, now: float) -> None:
        """Ends requests whose deadline has come, waiting or running."""
        for request in self._deadlines.take_due(now):
            code = REQUEST_TIMEOUT if request.has_started else QUEUE_TIMEOUT
            self.finish(request, FinishReason.ERROR, error=_ERRORS[code], code=code)

    def fail(self, index: int, error: str, code: str | None, param: str | None) -> None:
        """Ends a request with an error of its own; of no effect where it has ended."""
        if (request := self._live.get(index)) is not None:
            self.finish(request, FinishReason.ERROR, error=error, code=code, param=param)

    def fail_adapter(self, adapter: Adapter, error: str) -> None:
        """Ends the requests that wait for an adapter that could not be read again."""
        for request in [request for request in self._waiting if request.adapter is adapter]:
            self.finish(request, FinishReason.ERROR, error=error, code=ADAPTER_FAILED)

    def fail_all(self, error: str, code: str) -> None:
        """Ends every request with an error that another replica may not have."""
        for request in list(self._live.values()):
            self.finish(request, FinishReason.ERROR, error=error, code=code)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        error: str | None = None,
        code: str | None = None,
        param: str | None = None,
        stop_reason: str | None = None,
    ) -> None:
        """Ends a live request in whatever state, and gives back all that it holds."""
        num_tokens = len(request.token_ids)
        lent = None if self._offload is None else self._offload.finished(request, reason)
        if request.status is RequestStatus.RUNNING:
            num_tokens = int(self._tenancy.num_known[request.row])
            self._release(request)
        else:
            self._waiting.remove(request)
            if self._kv.holds(request):  # into which pages are being loaded
                self._kv.free(request)
        del self._live[request.index]
        self._deadlines.remove(request)
        if request.adapter is not None:
            self._adapters.left(request)
        end = Finished(request.index, reason, stop_token_id, error, code, param, stop_reason, lent)
        self._journal.ended(request, end, num_tokens)

    def _release(self, request: Request) -> None:
        """Takes a running request's row and blocks; the next plan tells the runner."""
        if request.adapter is not None:
            self._adapters.note_blocks(request)
            self._adapters.table.move_out(request.adapter)
        self._kv.free(request)
        if request.images:
            self._encoder.left(request)
        self._released.append(request.row)
        self._tenancy.move_out(request)

    # --- what there is to tell ---

    def take_outputs(
        self,
        tokens: Tokens | None = None,
        logprobs: Logprobs | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
        pooled: Pooled | None = None,
    ) -> RequestOutputs:
        """What has happened since the last call, with a step's tokens if there are any."""
        return self._journal.take(tokens, logprobs, prompt_logprobs, pooled)

    def take_ended(self) -> list[RequestFinished]:
        """Ends for the event stream, since the last call."""
        return self._journal.take_events()
