"""Every live request, from arrival to end, whatever the steps do meanwhile."""

from collections.abc import Iterable

from penstock.api.load_report import WaitingReason
from penstock.engine.cache.kv_manager import KVCacheManager
from penstock.engine.config import SchedulerConfig
from penstock.engine.core.scheduling.deadlines import Deadlines
from penstock.engine.core.scheduling.guides import Guide
from penstock.engine.core.scheduling.journal import Journal
from penstock.engine.core.scheduling.lora.adapter import Adapter
from penstock.engine.core.scheduling.lora.adapter_table import AdapterTable
from penstock.engine.core.scheduling.lora.adapters import Adapters
from penstock.engine.core.scheduling.pause import Closed
from penstock.engine.core.scheduling.request import Request, RequestStatus
from penstock.engine.core.scheduling.tenancy import Tenancy
from penstock.engine.core.scheduling.token_counters import TokenCounters
from penstock.engine.core.scheduling.waiting_room import WaitingRoom
from penstock.engine.messages import (
    ADAPTER_FAILED,
    ADAPTER_GONE,
    QUEUE_FULL,
    QUEUE_TIMEOUT,
    REQUEST_TIMEOUT,
    TENANT_QUEUE_FULL,
    AddRequest,
    ExtendPrompt,
    Finished,
    FinishReason,
    LifecycleEvent,
)
from penstock.prompt.hashing import BlockHasher

_ERRORS = {
    QUEUE_FULL: "the engine's queue is full; try again later",
    TENANT_QUEUE_FULL: "your share of the engine's queue is used up; try again later",
    QUEUE_TIMEOUT: "the request's time was up before it could run",
    REQUEST_TIMEOUT: "the request's time was up before its answer was complete",
}


class RequestBook:
    """Who waits, who runs, and how requests come and go.

    Args:
        config: Limits of the queue.
        max_model_len: Tokens of prompt and output together.
        longest_prompt: Tokens of a prompt at most.
        kv: Holds the running requests' blocks.
        hasher: Names them.
        table: Where adapters are.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        max_model_len: int,
        longest_prompt: int,
        kv: KVCacheManager,
        hasher: BlockHasher,
        table: AdapterTable,
    ) -> None:
        self.live: dict[int, Request] = {}
        self.adapters = Adapters(table, self.live, kv)
        self.counters = TokenCounters(config.tenant_weights)
        self.waiting = WaitingRoom(self.counters)
        self.tenancy = Tenancy(config.max_num_seqs, max_model_len)
        self.journal = Journal()
        self._policy = config.policy
        self._max_num_waiting = config.max_num_waiting
        self._max_model_len = max_model_len
        self._longest_prompt = longest_prompt
        self._kv = kv
        self._hasher = hasher
        self._deadlines = Deadlines()
        self._released: list[int] = []
        self._ordinal = 0

    # --- arrival ---

    def add(self, message: AddRequest, now: float, closed: Closed | None) -> None:
        """See `Scheduler.add`."""
        if message.index in self.live:
            raise ValueError(f"request {message.index} is there already")
        self._ordinal += 1
        adapter = self.adapters.serving(message.lora_id)
        request = Request(message, self._ordinal, adapter, now)
        if adapter is not None:
            self.adapters.table.joined(adapter)
        if self.counters.is_crowded:
            self.counters.prune(self.waiting.tenants, {other.tenant for other in self.live.values()})
        self.live[request.index] = request
        self.waiting.push(request, now)
        if closed is not None:
            self.finish(request, FinishReason.ERROR, error=closed.error, code=closed.code)
        elif message.lora_id and adapter is None:
            self.finish(request, FinishReason.ERROR, error="the adapter has been unloaded", code=ADAPTER_GONE)
        elif not message.input_complete or self._accept_prompt(request):
            self._make_room(request)
        if request.status.is_finished:
            return
        self._deadlines.add(request)
        self.journal.note(request, LifecycleEvent.QUEUED, now)
        if not message.input_complete:
            self.waiting.park(request, "streaming", now)

    def extend(self, message: ExtendPrompt, now: float) -> None:
        """See `Scheduler.extend`."""
        request = self.live.get(message.index)
        if request is None:
            return
        if request.status is not RequestStatus.WAITING_FOR_STREAMING_REQ:
            self.finish(request, FinishReason.ERROR, error="more of the prompt came after its last part")
            return
        request.extend_prompt(message.token_ids)
        if message.last or request.num_prompt_tokens > self._longest_prompt:
            self.unpark(request.index, now)

    def park(self, index: int, reason: WaitingReason, now: float) -> None:
        """See `Scheduler.park`."""
        request = self.live[index]
        if request.status is RequestStatus.RUNNING:
            raise KeyError(f"request {index} runs")
        self.waiting.park(request, reason, now)

    def unpark(self, index: int, now: float) -> None:
        """See `Scheduler.unpark`."""
        request = self.live.get(index)
        if request is None or not self.waiting.is_parked(request):
            return
        if request.has_started or self._accept_prompt(request):
            self.waiting.unpark(request, now)

    def guide(self, index: int, guide: Guide) -> None:
        """See `Scheduler.guide`."""
        request = self.live[index]
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
        elif self._kv.enable_prefix_caching:
            request.extend_hashes(self._hasher, request.token_ids)
        return not request.status.is_finished

    def _make_room(self, newcomer: Request) -> None:
        """Where more wait than may, one ends: of the tenant that has the most in the queue."""
        if len(self.waiting) - len(self.tenancy.free_rows) > self._max_num_waiting:
            code = TENANT_QUEUE_FULL if self.waiting.is_shared else QUEUE_FULL
            self.finish(self.waiting.one_too_many(newcomer), FinishReason.ERROR, error=_ERRORS[code], code=code)

    # --- the end ---

    def abort(self, indexes: Iterable[int]) -> None:
        """Ends requests in whatever state; unknown ones are ignored."""
        for index in indexes:
            if request := self.live.get(index):
                self.finish(request, FinishReason.ABORT)

    def expire(self, now: float) -> None:
        """Ends requests whose deadline has come, waiting or running."""
        for request in self._deadlines.take_due(now):
            code = REQUEST_TIMEOUT if request.has_started else QUEUE_TIMEOUT
            self.finish(request, FinishReason.ERROR, error=_ERRORS[code], code=code)

    def fail_adapter(self, adapter: Adapter, error: str) -> None:
        """Ends the requests that wait for an adapter that could not be read again."""
        for request in [request for request in self.waiting if request.adapter is adapter]:
            self.finish(request, FinishReason.ERROR, error=error, code=ADAPTER_FAILED)

    def fail_all(self, error: str, code: str) -> None:
        """See `Scheduler.fail_all`."""
        for request in list(self.live.values()):
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
        if request.status is RequestStatus.RUNNING:
            num_tokens = int(self.tenancy.num_known[request.row])
            self.release(request)
        else:
            self.waiting.remove(request)
        del self.live[request.index]
        self._deadlines.remove(request)
        if request.adapter is not None:
            self.adapters.table.left(request.adapter)
        end = Finished(request.index, reason, stop_token_id, error, code, param, stop_reason)
        self.journal.ended(request, end, num_tokens)

    def release(self, request: Request) -> None:
        """Takes a running request's row and blocks; the next plan tells the runner."""
        if request.adapter is not None:
            self.adapters.note_blocks(request)
            self.adapters.table.move_out(request.adapter)
        self._kv.free(request)
        self._released.append(request.row)
        self.tenancy.move_out(request)

    def take_released(self) -> list[int]:
        """Rows released since the last call."""
        released, self._released = self._released, []
        return released
