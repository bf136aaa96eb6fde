"""Times work on a device: with its own events, and with caches that hold nothing of the work."""

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

FLUSH_BYTES = 512 << 20
"""Several times a GPU's L2 (an H200: 60 MB)."""


class Clock(Protocol):
    """Of one device."""

    device: torch.device

    def seconds(self, work: Callable[[], object], *, repeats: int = 20, flush: bool = True) -> float:
        """The median of some runs after a few to warm up; `flush`: each begins with cold caches."""
        ...


class CudaClock:
    """A GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self._waste = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)

    def seconds(self, work: Callable[[], object], *, repeats: int = 20, flush: bool = True) -> float:
        """See Clock. Work that a CUDA graph can hold is timed as one, so that the host's launches do not count."""
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        run = _captured(work) or work
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for begin, end in pairs:
            if flush:
                self._waste.zero_()
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3


def _captured(work: Callable[[], object]) -> Callable[[], object] | None:
    """Its launches as a graph; None where it does what no graph can hold."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


class HostClock:
    """The machine itself: for tests of the figures."""

    device = torch.device("cpu")

    def seconds(self, work: Callable[[], object], *, repeats: int = 20, flush: bool = True) -> float:
        """The median of some runs after a few to warm up; `flush`: each begins with cold caches."""
        times: list[float] = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return statistics.median(times)
