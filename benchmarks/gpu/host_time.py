"""What the host does for a step of 256 running requests while it does not wait for the device."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu.engine import SHAPES, Engine
from gpu.figures import Row, percentile
from penstock.engine.roofline import Ceilings

RUNNING, CONTEXT, STEPS = 256, 256, 200


class Waits:
    """Adds up the time that is spent within calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, counted."""

        def counted(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds += time.perf_counter() - start

        return counted


@contextmanager
def counting_waits(waited: Any, name: str, waits: Waits) -> Iterator[None]:
    """Counts the calls of a class's method `name`, for as long as it lasts."""
    original = getattr(waited, name)
    setattr(waited, name, waits.timed(original))
    try:
        yield
    finally:
        setattr(waited, name, original)


def measure(
    shape: str,
    device: str = "cuda",
    *,
    folder: Path = SHAPES,
    running: int = RUNNING,
    context: int = CONTEXT,
    steps: int = STEPS,
    ceilings: Ceilings | None = None,
    waited: tuple[Any, str] | None = None,
) -> Row:
    """The figure's value is the median of a step's time less what it waited.

    Args:
        shape: The model.
        device: Where it runs.
        folder: Of the shapes.
        running: Requests in each step.
        context: Tokens of each at first.
        steps: Measured.
        ceilings: Of the device, where it is not to be measured.
        waited: The class and its method in which the host waits for the device; None: that of CUDA's transfers.
    """
    if waited is None:
        from penstock.engine.runner.device import runtime

        waited = (runtime._CudaTransfer, "wait")
    room = context + steps + 64
    engine = Engine(folder / shape, device=device, max_model_len=room, max_num_seqs=running, ceilings=ceilings)
    for _ in range(running):
        engine.add(context, steps + 32)
    engine.until_decoding(running)
    engine.steps(4)
    found: list[tuple[float, float]] = []
    waits = Waits()
    with counting_waits(*waited, waits):
        for _ in range(steps):
            before = waits.seconds
            seconds = engine.step().seconds
            found.append((seconds, waits.seconds - before))
    engine.drain()
    engine.close()
    host = [seconds - wait for seconds, wait in found]
    step, median = statistics.median(seconds for seconds, _ in found), statistics.median(host)
    hidden = "hidden behind the device" if step > 1.05 * median else "the host is what the step takes"
    return {
        "value": 1e3 * median,
        "bound_by": f"{hidden}: a step takes {1e3 * step:.3f} ms, {1e3 * (step - median):.3f} of which the host waits",
        "running": running,
        "host_p99_ms": 1e3 * percentile(host, 0.99),
        "step_ms": 1e3 * step,
    }
