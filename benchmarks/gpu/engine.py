"""An engine's core in this process, turned by hand: what it does is measured where nothing of a server is in between."""

import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.engine.args import EngineArgs
from penstock.engine.core.core import EngineCore
from penstock.engine.core.ipc.process import build_executor
from penstock.engine.messages import AddRequest
from penstock.engine.roofline import Ceilings
from penstock.engine.sampling import SamplingParams
from penstock.engine.stats import StepStats

SHAPES = Path(__file__).parent.parent / "shapes"
TOKENS = 256
"""Ids that every model has."""


class Step(NamedTuple):
    """One turn of the core."""

    seconds: float
    """Since the turn before it ended."""
    tokens: int
    finished: int


class Engine:
    """A model with made-up weights.

    Args:
        model: Its folder.
        ceilings: Of the device; None: those that the engine has measured.
        capture: Captures every CUDA graph first, which a server does in idle time: nothing here is ever idle.
        flags: Of the engine, as in `EngineArgs`.

    Raises:
        RuntimeError: Nobody knows the ceilings.
    """

    def __init__(self, model: Path, ceilings: Ceilings | None = None, capture: bool = True, **flags: Any) -> None:
        self.config = EngineArgs(model=str(model), load_format="dummy", enable_prefix_caching=False, **flags).config()
        executor, self.num_blocks = build_executor(self.config)
        while capture and (report := executor.call("capture_graph")[0]) is not None and report.pending:
            pass
        found = ceilings or executor.call("ceilings")[0]
        if found is None:
            raise RuntimeError(f"the ceilings of the device {self.config.device} are not known")
        self.ceilings = found
        [self.kv_layout] = executor.call("kv_layout")
        self.core = EngineCore(self.config, executor, self.num_blocks, 1, 0, self.kv_layout.groups, found)
        self._draw, self._count, self._last = random.Random(0), 0, time.perf_counter()

    def add(self, prompt: int, output: int, temperature: float = 0.6) -> None:
        """A request of so many random tokens that generates exactly so many."""
        tokens = [self._draw.randrange(TOKENS) for _ in range(prompt)]
        sampling = SamplingParams(max_tokens=output, temperature=temperature, seed=self._count)
        self.core.handle(AddRequest(self._count, f"b{self._count}", tokens, sampling, arrival_time=time.time()))
        self._count += 1

    def step(self) -> Step:
        """Turns the core once."""
        frame = self.core.step()
        self.core.take_events()
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        if frame is None:
            return Step(seconds, 0, 0)
        failed = [end.error for end in frame.finished if end.error]
        if failed:
            raise RuntimeError(failed[0])
        return Step(seconds, int(np.frombuffer(frame.offsets, np.int32)[-1]), len(frame.finished))

    def until_decoding(self, running: int) -> None:
        """Goes on until so many requests have their first token."""
        tokens = 0
        while tokens < running:
            tokens += self.step().tokens

    def steps(self, count: int) -> list[Step]:
        """So many turns, the first of which is not among them: it began before anybody looked."""
        self.step()
        return [self.step() for _ in range(count)]

    def drain(self) -> tuple[float, int]:
        """Goes on until nothing is left; the seconds, and the tokens."""
        start, tokens = time.perf_counter(), 0
        while self.core.has_work:
            tokens += self.step().tokens
        return time.perf_counter() - start, tokens

    def roofline_s(self) -> float:
        """Seconds that all steps submitted so far take at best."""
        roofline = self._stats().roofline
        assert roofline is not None
        return roofline.floor_s

    def step_seconds(self) -> float:
        """Seconds that all steps retired so far have taken, by the core's own clock."""
        return self._stats().seconds.total

    def launched(self) -> dict[str, int]:
        """Steps retired so far by graph mode and its reason; none where the device has no graphs."""
        return {f"{found.mode} {found.reason}": found.steps for found in self._stats().graphs}

    def _stats(self) -> StepStats:
        stats = self.core.stats().step
        assert stats is not None
        return stats

    def close(self) -> None:
        """Ends its threads."""
        self.core.close()
