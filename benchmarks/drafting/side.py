"""A core turned by hand, a few steps at a time, so that several take turns at the same requests."""

import gc
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.engine.args import EngineArgs
from penstock.engine.core.ipc.process import build_core, build_executor
from penstock.engine.core.plan import Int32
from penstock.engine.messages import AddRequest
from penstock.engine.runner.input_batch import MAX_TAPED_TOKENS
from penstock.engine.sampling import SamplingParams
from penstock.engine.spec.depth import DraftDepth
from penstock.engine.spec.filling import to_few_sizes

SLICE, COLD = 16, 2
"""Steps of a turn: few, so that what others do to the machine meanwhile falls on all sides alike. The first of them do not count,
and teach a side nothing of what drafts cost: they find in the processor's caches what the side before has left there, and an
engine that serves has its core to itself."""


class FixedDepth(DraftDepth):
    """So many drafts of each row in every step, whatever becomes of them: what an adaptive number is compared with."""

    def __init__(self, drafts: int) -> None:
        self._drafts, self.fill = drafts, to_few_sizes(MAX_TAPED_TOKENS)

    def learns_from(self, num_rows: int, drafts: int) -> bool:
        """Nothing is learned."""
        return False

    def admit(self, row: int) -> None:
        """Nothing is remembered."""

    def rests(self, num_rows: int) -> bool:
        """Never."""
        return False

    @property
    def idle(self) -> bool:
        """Never."""
        return False

    def observe(self, rows: Int32, drafted: Int32, accepted: Int32, others: int = 0, verified: int = 0) -> None:
        """Nothing is learned."""

    def observe_step(self, num_rows: int, drafts: float, seconds: float) -> None:
        """Nothing is learned."""

    def followed(self, num_rows: int, seconds: float) -> None:
        """Nothing is learned."""

    def in_vain(self, num_rows: int, seconds: float) -> None:
        """Nothing is learned."""

    def found_nothing(self, rows: Int32) -> None:
        """The proposer is asked again after the next step."""

    def most(self, rows: Int32, others: int = 0) -> int:
        """The number."""
        return self._drafts

    def choose(self, rows: Int32, proposed: Int32, usable: Int32, others: int = 0) -> list[int]:
        """The number, where the proposer has found as many."""
        return np.minimum(usable, self._drafts).tolist()


class Side:
    """One of the engines that are compared.

    Args:
        model: Its checkpoint.
        speculative: vLLM's keys of its drafts; None: it has none.
        fixed: Drafts of each row in every step; None: as many as pay.
    """

    def __init__(self, model: Path, speculative: dict[str, Any] | None, fixed: int | None = None) -> None:
        config = EngineArgs(
            model=str(model), device="cpu", kv_cache_memory_bytes=2**26, max_num_seqs=64, speculative_config=speculative
        ).config()
        executor, blocks = build_executor(config)
        self._core = build_core(config, executor, blocks, epoch=1)
        runner: Any = executor._runner  # type: ignore[attr-defined]
        self._own_drafts = runner._own_drafts
        if fixed is not None:
            self._own_drafts._depth = FixedDepth(fixed)
        # By its clock a step that others' turns divide from the next one would take as long as all of them.
        self._away_s, self._left = 0.0, time.process_time()
        runner._clock = lambda: time.process_time() - self._away_s
        self._first, self._running = 0, 0
        self._begun: set[int] = set()
        """Of those that run, who have given a token."""
        self._warm = False
        """Whether the last step was one of decodes alone, of all streams."""
        self._waiting: deque[AddRequest] = deque()
        self._drafts = (0, 0, 0)
        self.answers: dict[int, list[int]] = {}
        """Token ids by number of the request."""
        self.tokens = 0
        """Given since `begin`."""
        self._decoded, self._cpu_s = 0, 0.0

    def begin(self, prompts: Sequence[list[int]], streams: int, outputs: Sequence[int], temperature: float) -> None:
        """Takes requests, each for so many tokens, of which so many run at a time."""
        self._waiting.clear()
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            sampling = SamplingParams(max_tokens=output, temperature=temperature, seed=number)
            index = self._first + number
            # A salt of its own: nothing is found in the prefix cache.
            self._waiting.append(AddRequest(index, str(index), prompt, sampling, time.time(), cache_salt=str(index)))
        self._streams, self.answers, self.tokens = streams, {}, 0
        self._decoded, self._cpu_s = 0, 0.0
        self._offset, self._first = self._first, self._first + len(prompts)

    @property
    def over(self) -> bool:
        """Whether all have been answered."""
        return not self._waiting and not self._running

    @property
    def rate(self) -> float:
        """Tokens a CPU second in steps of all streams that took in no prompt, nor follow one that did, nor another side's turn.

        A step of prompts takes as long as many others and has no drafts. At the end no request waits, and steps of the streams
        that go on give less for their time.
        """
        return self._decoded / self._cpu_s

    def turn(self) -> None:
        """Goes on for some steps."""
        self._away_s += time.process_time() - self._left
        for number in range(SLICE):
            # A request reads its prompt until its first token, which may take several steps. The step behind them finds nothing
            # in the caches, on either side; where drafts end requests at several times there are more of such.
            decodes = self._running == self._streams == len(self._begun)
            counts, self._warm = decodes and self._warm and number >= COLD, decodes
            while self._waiting and self._running < self._streams:
                self._core.handle(self._waiting.popleft())
                self._running += 1
            if not self._running:
                break
            began = time.process_time()
            frame = self._core.step()
            self._core.take_events()
            took = time.process_time() - began
            if self._own_drafts is not None and number < COLD:
                self._own_drafts._last = None
            if frame is None:
                continue
            if failed := [end for end in frame.finished if end.error is not None]:
                raise RuntimeError(f"a request failed: {failed[0]}")
            given = 0
            for index, ids in tokens_of(frame):
                self._begun.add(index)
                self.answers.setdefault(index - self._offset, []).extend(ids)
                given += len(ids)
            self.tokens += given
            if counts:
                self._decoded, self._cpu_s = self._decoded + given, self._cpu_s + took
            self._running -= len(frame.finished)
            self._begun -= {end.index for end in frame.finished}
        self._left = time.process_time()

    def take_drafts(self) -> tuple[int, int, int]:
        """Rows with drafts that were verified, their drafts, and how many of these were accepted, since the last call."""
        step = self._core.stats().step
        if step is None or step.drafts is None:
            return 0, 0, 0
        before, now = self._drafts, (step.drafts.rows, sum(step.drafts.drafted), sum(step.drafts.accepted))
        self._drafts = now
        return now[0] - before[0], now[1] - before[1], now[2] - before[2]


def tokens_of(frame: Any) -> Iterator[tuple[int, list[int]]]:
    """Of each request that a step has given tokens: its index, and their ids."""
    offsets, ids = np.frombuffer(frame.offsets, np.int32), np.frombuffer(frame.token_ids, np.int32)
    for at, index in enumerate(np.frombuffer(frame.indexes, np.int64).tolist()):
        yield index, ids[offsets[at] : offsets[at + 1]].tolist()


def freeze_heap() -> None:
    """As an engine's process does once it has started: to look through all that is imported takes as long as a hundred steps, and
    would hit any side."""
    gc.collect()
    gc.freeze()


def answer(sides: Sequence[Side], prompts: Sequence[list[int]], streams: int, outputs: Sequence[int], temperature: float) -> None:
    """Lets all sides answer the same prompts, each in so many tokens.

    Who has given the fewest tokens so far is next, so that the sides are about equally far at any time. Raises RuntimeError where
    an answer differs.
    """
    for side in sides:
        side.begin(prompts, streams, outputs, temperature)
    while running := [side for side in sides if not side.over]:
        min(running, key=lambda side: side.tokens).turn()
    if any(side.answers != sides[0].answers for side in sides):
        raise RuntimeError("drafts have changed an answer")
