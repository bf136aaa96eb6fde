"""Decode attention over latents (DeepSeek V3), of one layer: how near it comes to a kernel that only reads them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from gpu.attention_peers import Peers, beside, latent_peers
from gpu.clock import Clock, CudaClock
from gpu.figures import Row
from gpu.read_stream import read_stream
from penstock.kernels.paged_attention.device_batch import DeviceBatch

ROTATED, LATENT, BLOCK = 64, 512, 64
"""Elements of a key: those that carry the position, then the latent, which is the value too."""
SCALE = (128 + ROTATED) ** -0.5
STREAM_BYTES = 1 << 30

Attend = Callable[[torch.Tensor, torch.Tensor, DeviceBatch], torch.Tensor]


class Case(NamedTuple):
    """A batch of one query each."""

    heads: int
    requests: int
    length: int
    gated: bool
    """Whether the figure's value is taken from it: all 128 heads are bound by operations."""


CASES = (Case(16, 64, 4096, True), Case(16, 256, 1024, True), Case(128, 64, 4096, False), Case(16, 1, 32_768, False))


def measure_case(case: Case, attend: Attend, clock: Clock, stream: float, peers: Callable[..., Peers], dtype: torch.dtype) -> Row:
    """Ours and the others', as shares of `stream` bytes a second."""
    size, count = ROTATED + LATENT, -(-case.length // BLOCK)
    q = torch.randn(case.requests, case.heads, size, dtype=dtype, device=clock.device)
    cache = torch.randn(case.requests * count + 1, 1, 1, BLOCK, size, dtype=dtype, device=clock.device)
    order = np.random.default_rng(0).permutation(np.arange(1, len(cache))).astype(np.int32).reshape(case.requests, count)
    starts, lengths = np.arange(case.requests + 1, dtype=np.int32), np.full(case.requests, case.length, np.int32)
    batch = DeviceBatch.from_host(starts, lengths, order, BLOCK, device=clock.device)
    read = case.requests * case.length * size * dtype.itemsize
    seconds = clock.seconds(lambda: attend(q, cache, batch))
    name = f"{case.requests} x {case.length:,}, {case.heads} heads"
    row: Row = {"case": name, "us": 1e6 * seconds, "floor_us": 1e6 * read / stream, "share_of_stream": read / seconds / stream}
    others = peers(q, cache, batch.block_table, batch.seq_lens, SCALE, LATENT)
    return row | {"peers": beside(others, clock, seconds, lambda theirs: {"us": 1e6 * theirs})}


def measure(
    device: str = "cuda",
    *,
    cases: Sequence[Case] = CASES,
    attend: Attend | None = None,
    clock: Clock | None = None,
    stream_bytes: int = STREAM_BYTES,
    peers: Callable[..., Peers] = latent_peers,
    dtype: torch.dtype = torch.bfloat16,
) -> Row:
    """The figure's value is the least share, in per cent, of the gated cases."""
    clock, attend = clock or CudaClock(), attend or triton_attend()
    numbers = torch.randint(-(2**31), 2**31 - 1, (stream_bytes // 4,), dtype=torch.int32, device=clock.device)
    stream = stream_bytes / clock.seconds(lambda: read_stream(numbers))
    rows = [measure_case(case, attend, clock, stream, peers, dtype) for case in cases]
    worst = min((row for row, case in zip(rows, cases, strict=True) if case.gated), key=lambda row: row["share_of_stream"])
    bound = f"{worst['case']}: {worst['us']:.0f} us, of which reading the latents takes {worst['floor_us']:.0f}"
    return {"value": 100 * worst["share_of_stream"], "bound_by": bound, "rows": rows}


def triton_attend() -> Attend:
    """The engine's own kernel, with the workspace that it would be given."""
    from penstock.kernels.paged_attention.latent_launch import sized_latent_workspace
    from penstock.kernels.paged_attention.launch import AttentionWorkspace
    from penstock.kernels.paged_attention.triton import paged_attention

    workspaces: dict[tuple[int, int, int], AttentionWorkspace] = {}

    def attend(q: torch.Tensor, cache: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        key = (q.shape[1], batch.num_tokens, batch.block_table.shape[1] * BLOCK)
        if key not in workspaces:
            heads, tokens, keys = key
            workspaces[key] = sized_latent_workspace(heads, LATENT, cache.itemsize, tokens, keys, False, str(q.device))
        return paged_attention(q, cache, batch, SCALE, workspace=workspaces[key], value_size=LATENT)

    return attend
