"""What programmatic dependent launch gains: the time between tokens with it and without, in one process."""

from collections.abc import Callable
from unittest.mock import patch

from gpu import itl
from gpu.figures import Row
from penstock.kernels import dependent_launch

BATCHES, STEPS = (1, 8), 100


def measure(shape: str, measure_itl: Callable[..., Row] = itl.measure) -> Row:
    """The figure's value is how many times as fast a step of the first batch is."""
    early = measure_itl(shape, batches=BATCHES, steps=STEPS)["rows"]
    with patch.object(dependent_launch, "overlaps", lambda _device: False):
        late = measure_itl(shape, batches=BATCHES, steps=STEPS)["rows"]
    rows = [
        {"batch": a["batch"], "itl_ms": a["itl_ms"], "itl_without_ms": b["itl_ms"], "times_as_fast": b["itl_ms"] / a["itl_ms"]}
        for a, b in zip(early, late, strict=True)
    ]
    return {"value": rows[0]["times_as_fast"], "bound_by": early[0]["bound_by"], "rows": rows}
