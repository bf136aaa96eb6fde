"""Steps of decodes beside a prompt: each as one graph, against graphs of the parts between its attentions."""

import statistics
from pathlib import Path
from typing import Final

from gpu.engine import SHAPES, Engine
from gpu.figures import Row, percentile
from penstock.engine.config import CudagraphMode
from penstock.engine.roofline import Ceilings

MODES: Final = ("FULL_AND_PIECEWISE", "FULL")
DECODING, CONTEXT, STEPS = 8, 4096, 40
TOKENS: Final = (32, 128, 512)
ROWS: Final = 256
"""Requests of a step at most, of which graphs for any number of requests have as many."""


def measure_steps(engine: Engine, tokens: int, decoding: int, steps: int) -> Row:
    """Steps of so many tokens: one of each request that decodes, the rest of a prompt that ends with the step."""
    before, seconds = engine.launched(), list[float]()
    for _ in range(steps):
        engine.add(tokens - decoding, 1)
        seconds.append(engine.step().seconds)
    launched = {of: count - before.get(of, 0) for of, count in engine.launched().items() if count > before.get(of, 0)}
    # The first turn began before anybody looked.
    return {"step_ms": 1e3 * statistics.median(seconds[1:]), "p99_ms": 1e3 * percentile(seconds[1:], 0.99), "launched": launched}


def measure(
    shape: str,
    device: str = "cuda",
    *,
    folder: Path = SHAPES,
    graphs: bool = True,
    decoding: int = DECODING,
    context: int = CONTEXT,
    sizes: tuple[int, int, int] = TOKENS,
    steps: int = STEPS,
    ceilings: Ceilings | None = None,
) -> Row:
    """The figure's value is how many times as fast a step of the second size is as one graph. `graphs`: the device has any."""
    found: dict[CudagraphMode, list[Row]] = {}
    output = decoding + len(sizes) * steps + 16
    for mode in MODES:
        flags = {"cudagraph_mode": mode, "cudagraph_capture_sizes": sizes} if graphs else {}
        room = context + output + 16
        engine = Engine(folder / shape, ceilings, device=device, max_num_seqs=ROWS, max_model_len=room, **flags)
        for _ in range(decoding):
            engine.add(context, output)
        engine.until_decoding(decoding)
        found[mode] = [measure_steps(engine, tokens, decoding, steps) for tokens in sizes]
        engine.drain()
        engine.close()
    rows = [
        {"tokens": tokens, "times_as_fast": pieces["step_ms"] / whole["step_ms"], "pieces": pieces, "whole": whole}
        for tokens, pieces, whole in zip(sizes, *found.values(), strict=True)
    ]
    return {"value": rows[1]["times_as_fast"], "bound_by": "see `launched` of each row", "decoding": decoding, "rows": rows}
