"""Whether the share of the roofline that the engine tells of itself is the one that a profiler sees; and which ceiling binds."""

from collections.abc import Callable
from pathlib import Path

from gpu.engine import SHAPES, Engine
from gpu.figures import Row, ceilings_told
from gpu.profiler import Profile, profile
from penstock.engine.roofline import Ceilings

CONTEXT, STEPS = 1024, 100
BATCHES = (1, 64)


def compare(engine: Engine, batch: int, context: int, steps: int, profiler: Callable[[Callable[[], object]], Profile]) -> Row:
    """Steps of a batch, timed by the core's own meter and by the profiler."""
    for _ in range(batch):
        engine.add(context, steps + 16)
    engine.until_decoding(batch)
    engine.steps(4)
    floor, seconds, count = engine.roofline_s(), engine.step_seconds(), engine.core.num_steps
    profiled = profiler(lambda: engine.steps(steps - 1))
    floor, seconds, count = engine.roofline_s() - floor, engine.step_seconds() - seconds, engine.core.num_steps - count
    engine.drain()
    # The span begins with the first step's kernels and ends with the last one's.
    own, seen = floor / seconds, floor / profiled.span_s
    return {"batch": batch, "steps": count, "own_share": own, "profilers_share": seen, "off_percent": 100 * abs(own / seen - 1)}


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
    """The figure's value is the greatest difference, in per cent of the profiler's."""
    room = context + steps + 64
    engine = Engine(folder / shape, device=device, max_model_len=room, max_num_seqs=max(batches), ceilings=ceilings)
    rows = [compare(engine, batch, context, steps, profiler) for batch in batches]
    model = engine.config.model.cost
    assert model is not None
    says = ceilings_told(model, engine.ceilings, engine.num_blocks * engine.kv_layout.page_bytes)
    engine.close()
    worst = max(rows, key=lambda row: row["off_percent"])
    told = f"batch {worst['batch']}: {worst['own_share']:.1%} by its own clock, {worst['profilers_share']:.1%} by the profiler's"
    return {"value": worst["off_percent"], "bound_by": told, "rows": rows, "says": says}
