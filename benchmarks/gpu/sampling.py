"""Sampling with filters at a large vocabulary: how far it is from reading the logits once."""

from collections.abc import Sequence

import torch

from gpu.clock import Clock, CudaClock
from gpu.figures import Row
from gpu.read_stream import read_stream
from penstock.engine.runner.sampler.sampler import Sampler, path_of
from penstock.engine.sampling import SamplingParams
from penstock.kernels.sampling.ops import SamplingOps, sampling_ops

ROWS, VOCAB = 256, 151_936
KINDS = {
    "greedy": SamplingParams(max_tokens=1, temperature=0.0),
    "random": SamplingParams(max_tokens=1, temperature=0.8, seed=1),
    "top_k 50, top_p 0.9": SamplingParams(max_tokens=1, temperature=0.8, top_k=50, top_p=0.9, seed=1),
    "top_p 0.95": SamplingParams(max_tokens=1, temperature=1.0, top_p=0.95, seed=1),
    "min_p 0.02": SamplingParams(max_tokens=1, temperature=1.0, min_p=0.02, seed=1),
    "top_p 0.99 of a flat row": SamplingParams(max_tokens=1, temperature=2.0, top_p=0.99, seed=1),
}
"""The last is one for which a row is read again and again: its candidates do not tell what is left."""
GATED = "top_k 50, top_p 0.9"


def measure(
    device: str = "cuda",
    *,
    rows: int = ROWS,
    vocab: int = VOCAB,
    clock: Clock | None = None,
    ops: SamplingOps | None = None,
    kinds: Sequence[str] = tuple(KINDS),
) -> Row:
    """The figure's value is the time of the gated kind, in microseconds, from logits in bfloat16."""
    clock = clock or CudaClock()
    logits = torch.randn(rows, vocab, device=clock.device) * 4
    halves = logits.bfloat16()
    numbers = halves.view(torch.int32).flatten()
    floor = clock.seconds(lambda: read_stream(numbers))
    request_rows = torch.arange(rows, dtype=torch.int32, device=clock.device)
    found: list[Row] = []
    for kind in kinds:
        sampler = Sampler(rows, rows, vocab, clock.device, ops or sampling_ops(clock.device))
        for row in range(rows):
            sampler.admit(row, KINDS[kind])
        changed, words = sampler.take_changes()
        sampler.params[torch.from_numpy(changed).long()] = torch.from_numpy(words).to(clock.device)
        path = path_of(KINDS[kind])
        took = [
            clock.seconds(lambda of=of, sampler=sampler, path=path: sampler.sample(of, request_rows, request_rows, path))
            for of in (halves, logits)
        ]
        found.append({"kind": kind, "us": 1e6 * took[0], "over_a_read": took[0] / floor, "float32_us": 1e6 * took[1]})
    [gated] = [row for row in found if row["kind"] == GATED]
    bound = f"{gated['over_a_read']:.1f} times the time of one read of the logits ({1e6 * floor:.0f} us)"
    return {"value": gated["us"], "bound_by": bound, "floor_us": 1e6 * floor, "rows": found}
