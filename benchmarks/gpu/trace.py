"""What a step of each kind launches, and how long that takes: `python -m gpu.trace SHAPE`; a line of JSON for each kind."""

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from gpu.engine import SHAPES, Engine
from gpu.figures import Row
from penstock.engine.roofline import H200

TOP = 20
"""Kernels that are listed, those that take longest."""


class Kind(NamedTuple):
    """A step to trace."""

    name: str
    decoding: int
    """Requests that decode."""
    prompt: int
    """Tokens of a prompt that comes with them; 0: none does."""


KINDS = (
    Kind("decode of 1", 1, 0),
    Kind("decode of 8", 8, 0),
    Kind("decode of 256", 256, 0),
    Kind("prompt of 2,048", 0, 2048),
    Kind("decode of 8 beside a prompt of 512", 8, 512),
)
CONTEXT, LEFT = 512, 64
"""Tokens of a decoding request at first, and those that it has still to generate."""


class Ran(NamedTuple):
    """One kernel or copy, in microseconds."""

    name: str
    begin: float
    end: float


def cuda_events(work: Callable[[], object]) -> list[Ran]:
    """What the device ran during some work."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        work()
        torch.cuda.synchronize()
    on_device = [it for it in profiler.events() if it.device_type is torch.autograd.DeviceType.CUDA]
    return [Ran(it.name, it.time_range.start, it.time_range.end) for it in on_device]


def told(kind: Kind, ran: Sequence[Ran]) -> Row:
    """The row of a kind: launches, the time from the first to the last, the gaps between them, and the kernels by time."""
    ordered, by_name = sorted(ran, key=lambda it: it.begin), defaultdict[str, list[float]](list)
    gaps, until = 0.0, ordered[0].begin if ordered else 0.0
    for it in ordered:
        by_name[it.name].append(it.end - it.begin)
        gaps += max(0.0, it.begin - until)
        until = max(until, it.end)
    longest = sorted(by_name.items(), key=lambda it: -sum(it[1]))[:TOP]
    kernels = [{"name": name[:120], "launches": len(times), "us": round(sum(times), 2)} for name, times in longest]
    span = until - ordered[0].begin if ordered else 0.0
    return {"kind": kind.name, "launches": len(ordered), "span_us": round(span, 1), "idle_us": round(gaps, 1), "kernels": kernels}


def traces(
    engine: Engine, kinds: Sequence[Kind], context: int, events: Callable[[Callable[[], object]], list[Ran]] = cuda_events
) -> Iterator[Row]:
    """A row for each kind of step."""
    for kind in kinds:
        for _ in range(kind.decoding):
            engine.add(context, LEFT)
        if kind.decoding:
            engine.until_decoding(kind.decoding)
            engine.steps(4)
        if kind.prompt:
            engine.add(kind.prompt, 2)
        yield {"rows": [told(kind, events(engine.step))]}
        engine.drain()


def main(shape: str, dry: bool) -> int:
    """Prints a line for each kind, as it is known."""
    if dry:
        model = Path(__file__).resolve().parents[2] / "examples/models/penstock-tiny"
        engine, kinds, context = (
            Engine(model, H200, device="cpu", max_model_len=256, max_num_seqs=2),
            [Kind("decode of 2", 2, 0)],
            16,
        )
        found = traces(engine, kinds, context, lambda work: [Ran(str(type(work()).__name__), 0.0, 1.0)])
    else:
        engine = Engine(SHAPES / shape, max_model_len=4096, max_num_seqs=256, device="cuda")
        found = traces(engine, KINDS, CONTEXT)
    for row in found:
        print(json.dumps(row), flush=True)
    engine.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], "--dry-run" in sys.argv))
