"""One pass a step over the core's columnar frame, for all requests."""

import asyncio
import logging
from collections.abc import Sequence
from struct import unpack

import numpy as np

from penstock.engine.frontend.errors import ApiError, engine_error, internal_error
from penstock.engine.frontend.generation import Choice, Generation, PromptLogprob, TokenLogprob
from penstock.engine.frontend.observe.metrics import EngineMetrics
from penstock.engine.frontend.observe.timeline import turns
from penstock.engine.messages import (
    FINISH_REASONS,
    Finished,
    FinishReason,
    Lifecycle,
    Logprobs,
    Pooled,
    PromptLogprobs,
    StepOutputs,
)

log = logging.getLogger(__name__)

SLICE = 128
"""Requests of a frame between which other tasks get their turn."""
_LEAST_LOGPROB = -9999.0  # JSON has no infinity


class Egress:
    """The live choices by their number in the core.

    Args:
        metrics: Counts what passes.
    """

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._live: dict[int, tuple[Choice, Generation]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def add(self, generation: Generation) -> None:
        """Expects output for a request; call it before the core hears of it."""
        for choice in generation.choices:
            self._live[choice.index] = (choice, generation)

    def forget(self, generation: Generation) -> list[int]:
        """Drops what is left of a request; returns the choices that the core still works on."""
        gone = [choice.index for choice in generation.choices if self._live.pop(choice.index, None) is not None]
        self._metrics.finished.add(len(gone), "abort")
        return gone

    def fail_all(self, error: ApiError) -> None:
        """Ends every request with an error."""
        live, self._live = self._live, {}
        self._metrics.finished.add(len(live), "error")
        for _, generation in live.values():
            generation.fail(error)

    async def process(self, frame: StepOutputs) -> list[int]:
        """Hands a frame's tokens to their requests; returns the choices that the core is to abort.

        Output for choices that are not live any more is ignored.
        """
        if frame.lifecycle is not None:
            self._turn(frame.lifecycle)
        for started in frame.started:
            if (live := self._live.get(started.index)) is not None:
                live[0].cached_tokens = started.cached_tokens
                self._metrics.started(live[0])
        if frame.prompt_logprobs is not None:
            self._score_prompts(frame.prompt_logprobs)
        if frame.pooled is not None:
            self._take_pooled(frame.pooled, frame.time)
        aborts: list[int] = []
        gaps: dict[float, int] = {}  # how often each: most sequences of a frame were in the one before, too
        generated = 0
        columns, now = _Columns(frame), frame.time
        finished = {end.index: end for end in frame.finished}
        changed: dict[Generation, None] = {}
        for at, index in enumerate(columns.indexes):
            if at % SLICE == SLICE - 1:
                _tell(changed)
                await asyncio.sleep(0)
            if (live := self._live.get(index)) is None:
                continue
            choice, generation = live
            end = finished.pop(index, None) if finished else None
            first, past = columns.offsets[at], columns.offsets[at + 1]
            generated += past - first
            if past - first == 1 and end is None and choice.num_tokens and choice.num_logprobs is None:
                # Nearly every token there is: what the other branch does with it, without its calls.
                gap = now - choice.last_time
                gaps[gap] = gaps.get(gap, 0) + 1
                choice.last_time = now
                stopped = choice.add_token(columns.token_ids[first], None)
            else:
                self._time(choice, generation, now, past - first, gaps)
                stopped = _advance(choice, columns, range(first, past), end)
            if end is not None:
                choice.lent = end.lent
            if stopped:
                if end is None:
                    aborts.append(index)
                self._finished(choice, generation)
            elif end is not None:
                aborts += self._end(choice, generation, end)
            if generation.concerns(choice):
                changed[generation] = None
        for index, end in finished.items():  # ended without a token in this frame
            if (live := self._live.get(index)) is not None:
                aborts += self._end(*live, end)
                if live[1].concerns(live[0]):
                    changed[live[1]] = None
        _tell(changed)
        self._metrics.generation_tokens.add(generated)
        for gap, times in gaps.items():
            self._metrics.itl.observe(gap, times)
        return aborts

    def _turn(self, lifecycle: Lifecycle) -> None:
        for index, event, time in turns(lifecycle):
            if (live := self._live.get(index)) is not None:
                live[0].turns.append((event, time))

    def _score_prompts(self, columns: PromptLogprobs) -> None:
        indexes: list[int] = np.frombuffer(columns.indexes, dtype="<i8").tolist()
        positions: list[int] = np.frombuffer(columns.positions, dtype="<i4").tolist()
        token_ids: list[int] = np.frombuffer(columns.token_ids, dtype="<i4").tolist()
        logprobs: list[float] = np.frombuffer(columns.logprobs, dtype="<f4").tolist()
        ranks: list[int] = np.frombuffer(columns.ranks, dtype="<i4").tolist()
        shape = (len(indexes), columns.width)
        top_ids: list[list[int]] = np.frombuffer(columns.top_ids, dtype="<i4").reshape(shape).tolist()
        top: list[list[float]] = np.frombuffer(columns.top_logprobs, dtype="<f4").reshape(shape).tolist()
        for at, index in enumerate(indexes):
            live = self._live.get(index)
            if live is not None and (scores := live[0].prompt_logprobs) is not None:
                others = _alternatives(top_ids[at], top[at])
                entry = PromptLogprob(token_ids[at], max(logprobs[at], _LEAST_LOGPROB), ranks[at], others)
                scores[positions[at]] = entry

    def _take_pooled(self, columns: Pooled, now: float) -> None:
        vectors = np.frombuffer(columns.vectors, dtype="<f4").reshape(-1, columns.size)
        for index, vector in zip(np.frombuffer(columns.indexes, dtype="<i8").tolist(), vectors, strict=True):
            if (live := self._live.get(index)) is not None:
                live[0].pooled = vector
                live[0].first_time = live[0].last_time = now

    def _time(self, choice: Choice, generation: Generation, now: float, tokens: int, gaps: dict[float, int]) -> None:
        """Latencies by the core's clock; tokens of one step have no time between them."""
        if tokens == 0:
            return
        if choice.num_tokens == 0:
            choice.first_time = now
            self._metrics.ttft.observe(now - generation.arrival)
        else:
            gap = now - choice.last_time
            gaps[gap] = gaps.get(gap, 0) + 1
        if tokens > 1:
            choice.runs.append((choice.num_tokens, tokens, now))
            gaps[0.0] = gaps.get(0.0, 0) + tokens - 1
        choice.last_time = now

    def _end(self, choice: Choice, generation: Generation, end: Finished) -> list[int]:
        """Ends a choice as the core says; one that failed takes its request with it."""
        if end.reason not in (FinishReason.ABORT, FinishReason.ERROR):
            choice.finish(FINISH_REASONS[end.reason], end.stop_token_id, end.stop_reason)
            self._finished(choice, generation)
            return []
        del self._live[choice.index]
        self._metrics.finished.add(1, FINISH_REASONS[end.reason])
        message = end.error or "the engine core aborted the request"
        if end.code is not None:
            generation.fail(engine_error(message, end.code, end.param))
        else:
            log.error("request failed: %s", message)
            generation.fail(ApiError(500, message, "server_error"))
        return self.forget(generation)

    def _finished(self, choice: Choice, generation: Generation) -> None:
        del self._live[choice.index]
        self._metrics.completed(choice, generation)


class _Columns:
    """A frame's arrays as Python's integers, which cost less than arrays where each element is looked at."""

    def __init__(self, frame: StepOutputs) -> None:
        self.indexes: tuple[int, ...] = unpack(f"<{len(frame.indexes) // 8}q", frame.indexes)
        self.offsets: tuple[int, ...] = unpack(f"<{len(frame.offsets) // 4}i", frame.offsets)
        self.token_ids: tuple[int, ...] = unpack(f"<{len(frame.token_ids) // 4}i", frame.token_ids)
        self._logprobs = frame.logprobs
        if frame.logprobs is not None:
            self._read(frame.logprobs)

    def _read(self, columns: Logprobs) -> None:
        positions: list[int] = np.frombuffer(columns.positions, dtype="<i4").tolist()
        self._row_of = {position: row for row, position in enumerate(positions)}
        shape = (len(positions), columns.width)
        self._sampled: list[float] = np.frombuffer(columns.sampled, dtype="<f4").tolist()
        self._ranks: list[int] = np.frombuffer(columns.ranks, dtype="<i4").tolist()
        self._top_ids: list[list[int]] = np.frombuffer(columns.top_ids, dtype="<i4").reshape(shape).tolist()
        self._top: list[list[float]] = np.frombuffer(columns.top_logprobs, dtype="<f4").reshape(shape).tolist()

    def logprob(self, position: int, choice: Choice) -> TokenLogprob | None:
        """Return the log-probability of the token at a position of the frame, with the number of alternatives that its request
        asked for."""
        if self._logprobs is None or choice.num_logprobs is None:
            return None
        row = self._row_of[position]
        width = choice.num_logprobs
        top = _alternatives(self._top_ids[row][:width], self._top[row][:width])
        sampled = max(self._sampled[row], _LEAST_LOGPROB)
        return TokenLogprob(self.token_ids[position], sampled, top, choice.characters, self._ranks[row])


def _tell(changed: dict[Generation, None]) -> None:
    """Has the news of requests taken, once for all choices of each."""
    for generation in changed:
        try:
            generation.tell()
        except Exception:  # this request's trouble alone
            log.exception("a stream failed")
            generation.fail(internal_error())
    changed.clear()


def _alternatives(token_ids: list[int], logprobs: list[float]) -> list[tuple[int, float]]:
    """Without what pads them."""
    return [(token, max(logprob, _LEAST_LOGPROB)) for token, logprob in zip(token_ids, logprobs, strict=True) if token >= 0]


def _advance(choice: Choice, columns: _Columns, positions: Sequence[int], end: Finished | None) -> bool:
    """Adds tokens until a stop string is complete, and says whether one is; tokens after it do not count."""
    last = positions[-1] if end is not None and end.stop_token_id is not None else -1
    for position in positions:
        token_id = columns.token_ids[position]
        logprob = None if choice.num_logprobs is None else columns.logprob(position, choice)
        if position == last:
            choice.add_stop_token(token_id, logprob)
        elif choice.add_token(token_id, logprob):
            return True
    return False
