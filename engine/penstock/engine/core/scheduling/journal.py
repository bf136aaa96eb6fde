"""What the scheduler has to tell: to the frontend with the next frame, and to the event stream."""

from array import array

from penstock.api.events import RequestFinished
from penstock.engine.core.scheduling.outputs import RequestOutputs, Tokens, no_tokens
from penstock.engine.core.scheduling.request import FINISHED_STATUS, Request
from penstock.engine.messages import (
    FINISH_REASONS,
    Finished,
    Lifecycle,
    LifecycleEvent,
    Logprobs,
    Pooled,
    PromptLogprobs,
    Started,
)


class Journal:
    """Collects events of requests until they are taken. Times are Unix time in seconds."""

    def __init__(self) -> None:
        self._now = 0.0
        self._started: list[Started] = []
        self._finished: list[Finished] = []
        self._ended: list[RequestFinished] = []
        self._clear_lifecycle()

    def note(self, request: Request, event: LifecycleEvent, now: float) -> None:
        """A request was queued, scheduled or preempted."""
        # A clock that is set back must not turn an interval negative.
        self._now = max(self._now, now)
        self._indexes.append(request.index)
        self._events.append(event)
        self._times.append(self._now)

    def started(self, request: Request) -> None:
        """A request was scheduled for the first time."""
        self._started.append(Started(request.index, request.num_cached_tokens))

    def ended(self, request: Request, end: Finished, num_tokens: int) -> None:
        """A request has come to its end, with `num_tokens` of prompt and output."""
        request.status = FINISHED_STATUS[end.reason]
        self._finished.append(end)
        self._ended.append(
            RequestFinished(
                request_id=request.request_id,
                reason=FINISH_REASONS[end.reason],
                prompt_tokens=request.num_prompt_tokens,
                cached_tokens=max(request.num_cached_tokens, 0),
                output_tokens=num_tokens - request.num_prompt_tokens,
                ttft_s=request.ttft_s,
            )
        )

    def take_events(self) -> list[RequestFinished]:
        """Ends for the event stream, since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def take(
        self,
        tokens: Tokens | None = None,
        logprobs: Logprobs | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
        pooled: Pooled | None = None,
    ) -> RequestOutputs:
        """Return everything since the last call, with a step's tokens if there are any."""
        started, finished, lifecycle = self._started, self._finished, None
        self._started, self._finished = [], []
        if self._indexes:
            lifecycle = Lifecycle(self._indexes.tobytes(), bytes(self._events), self._times.tobytes())
            self._clear_lifecycle()
        sent = tokens or no_tokens()
        columns = sent.indexes, sent.offsets, sent.token_ids
        return RequestOutputs(*columns, started, finished, logprobs, prompt_logprobs, lifecycle, pooled)

    def _clear_lifecycle(self) -> None:
        self._indexes, self._events, self._times = array("q"), bytearray(), array("d")
