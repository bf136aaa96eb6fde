"""Causal attention over one prompt, of one layer: operations a second."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from gpu.attention_peers import Peers, beside, prefill_peers
from gpu.clock import Clock, CudaClock
from gpu.decode_attention import BLOCK, HEAD_SIZE, HEADS, KV_HEADS, Attend, triton_attend
from gpu.figures import Row, causal_flops
from penstock.kernels.paged_attention.device_batch import DeviceBatch

LENGTHS = (2048, 8192, 16_384)
GATED = 8192


def measure_length(length: int, attend: Attend, clock: Clock, peers: Callable[..., Peers], dtype: torch.dtype) -> Row:
    """Ours over pages, the others over tensors that lie side by side."""
    device, count = clock.device, -(-length // BLOCK)
    q = torch.randn(length, HEADS, HEAD_SIZE, dtype=dtype, device=device)
    cache = torch.randn(count + 1, 2, KV_HEADS, BLOCK, HEAD_SIZE, dtype=dtype, device=device)
    table = np.random.default_rng(0).permutation(np.arange(1, count + 1)).astype(np.int32)[None]
    bounds = np.array([0, length], np.int32)
    batch = DeviceBatch.from_host(bounds, bounds[1:], table, BLOCK, device=device)
    scale, flops = HEAD_SIZE**-0.5, causal_flops(length, HEADS, HEAD_SIZE)
    seconds = clock.seconds(lambda: attend(q, cache, batch, scale), flush=False)
    row: Row = {"length": length, "ms": 1e3 * seconds, "tflops": flops / seconds / 1e12}
    k, v = (torch.randn(length, KV_HEADS, HEAD_SIZE, dtype=dtype, device=device) for _ in range(2))
    told = beside(peers(q, k, v, scale), clock, seconds, lambda theirs: {"tflops": flops / theirs / 1e12}, flush=False)
    return row | {"peers": told}


def measure(
    device: str = "cuda",
    *,
    lengths: Sequence[int] = LENGTHS,
    gated: int = GATED,
    attend: Attend | None = None,
    clock: Clock | None = None,
    peers: Callable[..., Peers] = prefill_peers,
    dtype: torch.dtype = torch.bfloat16,
) -> Row:
    """The figure's value is TFLOP/s at the length that is gated."""
    clock, attend = clock or CudaClock(), attend or triton_attend()
    rows = [measure_length(length, attend, clock, peers, dtype) for length in lengths]
    [row] = [row for row in rows if row["length"] == gated]
    best = max((peer["tflops"] for peer in row["peers"].values() if "tflops" in peer), default=None)
    beside = f"the fastest peer here reaches {best:.0f} TFLOP/s" if best else "no peer was there"
    return {"value": row["tflops"], "bound_by": f"operations; {beside}", "rows": rows}
