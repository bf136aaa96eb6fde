"""The time between tokens: of one request at a context of 1,024 tokens, and of larger batches beside it."""

import statistics
from collections.abc import Callable
from pathlib import Path

from gpu.engine import SHAPES, Engine
from gpu.figures import Row, bound_of_step, percentile
from gpu.profiler import Profile, profile
from penstock.engine.roofline import Ceilings

CONTEXT, STEPS, PROFILED = 1024, 200, 20
BATCHES = (1, 8, 32, 128)


def measure_batch(
    engine: Engine, batch: int, ceilings: Ceilings, context: int, steps: int, profiler: Callable[[Callable[[], object]], Profile]
) -> Row:
    """Decode steps of `batch` requests that have `context` tokens each at first; the requests end with it."""
    output = steps + PROFILED + 16
    for _ in range(batch):
        engine.add(context, output)
    engine.until_decoding(batch)
    before = engine.roofline_s()
    found = [step.seconds for step in engine.steps(steps)]
    # One more step was made than is timed.
    floor = (engine.roofline_s() - before) / (steps + 1)
    profiled = profiler(lambda: engine.steps(PROFILED - 1))
    engine.drain()
    median = statistics.median(found)
    return {
        "batch": batch,
        "itl_ms": 1e3 * median,
        "itl_p99_ms": 1e3 * percentile(found, 0.99),
        "floor_ms": 1e3 * floor,
        "share_of_roofline": floor / median,
        "device_busy_ms": 1e3 * profiled.busy_s / PROFILED,
        "kernels": profiled.kernels / PROFILED,
        "bound_by": bound_of_step(median, floor, profiled.busy_s / PROFILED),
    }


def measure(
    shape: str,
    device: str = "cuda",
    *,
    folder: Path = SHAPES,
    batches: tuple[int, ...] = BATCHES,
    context: int = CONTEXT,
    steps: int = STEPS,
    ceilings: Ceilings | None = None,
    profiler: Callable[[Callable[[], object]], Profile] = profile,
) -> Row:
    """The figure's value is the first batch's median."""
    room = context + steps + PROFILED + 32
    engine = Engine(folder / shape, device=device, max_model_len=room, max_num_seqs=max(batches), ceilings=ceilings)
    rows = [measure_batch(engine, batch, engine.ceilings, context, steps, profiler) for batch in batches]
    engine.close()
    return {"value": rows[0]["itl_ms"], "bound_by": rows[0]["bound_by"], "context": context, "rows": rows}
