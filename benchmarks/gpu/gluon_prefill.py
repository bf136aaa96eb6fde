"""Long prompts on the kernel in Gluon beside the launch in Triton: whether `--prefill-attention-backend gluon` pays."""

from collections.abc import Sequence

import torch

from gpu.clock import Clock, CudaClock
from gpu.decode_attention import Attend, triton_attend
from gpu.figures import Row
from gpu.prefill_attention import GATED, LENGTHS, measure_length


def gluon_attend() -> Attend:
    """Prompts without split keys, so that no workspace is needed."""
    from penstock.kernels.paged_attention.launch import gluon_launches
    from penstock.kernels.paged_attention.triton import paged_attention

    return lambda q, cache, batch, scale: paged_attention(q, cache, batch, scale, table=gluon_launches)


def measure(
    device: str = "cuda",
    *,
    lengths: Sequence[int] = LENGTHS,
    gated: int = GATED,
    ours: Attend | None = None,
    triton: Attend | None = None,
    clock: Clock | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Row:
    """The figure's value is how many times as fast it is at the length that is gated."""
    clock, ours, triton = clock or CudaClock(), ours or gluon_attend(), triton or triton_attend()
    rows: list[Row] = []
    for length in lengths:
        of_triton, of_gluon = (measure_length(length, attend, clock, lambda *_: {}, dtype) for attend in (triton, ours))
        rows.append({
            "length": length, "tflops": of_gluon["tflops"], "tflops_of_triton": of_triton["tflops"],
            "times_as_fast": of_gluon["tflops"] / of_triton["tflops"],
        })  # fmt: skip
    [row] = [row for row in rows if row["length"] == gated]
    return {"value": row["times_as_fast"], "bound_by": f"operations: {row['tflops']:.0f} TFLOP/s", "rows": rows}
