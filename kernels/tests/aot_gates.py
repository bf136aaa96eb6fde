"""Compiles the Triton operations for sm_90 as a model of 8 billion parameters launches them, and prints what each kernel takes.

    python kernels/tests/aot_gates.py    one line of JSON a variant: name, registers, stack, shared memory, and of
                                           prompts' attention whether it multiplies by Hopper's own instructions

A program of its own, since a process interprets Triton's kernels or compiles them, never both.
"""

import json
from collections.abc import Callable

import aot_dense
import aot_sampling
import torch
from aot_dense import empty

from penstock.kernels.compile_only import compile_only
from penstock.kernels.paged_attention.device_batch import DeviceBatch
from penstock.kernels.paged_attention.launch import LaunchTable, fast_launches, invariant_launches
from penstock.kernels.paged_attention.triton import paged_attention
from penstock.kernels.sampling.buffers import RESULT
from penstock.kernels.step_state import triton as step_state
from penstock.kernels.step_state.batch import RowState, StepInputs, StepRequest, Targets


def steps() -> None:
    """What surrounds the model in a step of 256 requests."""

    def ints(*shape: int) -> torch.Tensor:
        return empty(*shape, dtype=torch.int32)

    def longs(*shape: int) -> torch.Tensor:
        return empty(*shape, dtype=torch.int64)

    state = RowState(ints(257, 8192), ints(257), ints(1, 257, 512), ints(1), ints(257))
    step = StepRequest(ints(256), ints(257), ints(256), ints(1))
    inputs = StepInputs(ints(256), longs(256), longs(1, 256), ints(256), ints(256), longs(256))
    step_state.apply_changes(ints(1 << 16), 770, 3, Targets([ints(257, 8192)]))
    step_state.prepare_inputs(step, state, inputs)
    step_state.commit_step(ints(256, RESULT), step, inputs, state, ints(3, 256, RESULT))


def attention(
    heads: tuple[int, int, int],
    requests: int,
    queries: int,
    tokens: int,
    *,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: bool = False,
    table: LaunchTable = fast_launches,
    dtype: torch.dtype = torch.bfloat16,
) -> Callable[[], None]:
    """Of query heads, key heads and head size: a step of so many requests and tokens, with so many queries a request at most."""

    def launch() -> None:
        num_heads, kv_heads, head_size = heads
        lens, starts, blocks = (empty(*size, dtype=torch.int32) for size in ((requests,), (requests + 1,), (257, 2048)))
        batch = DeviceBatch(16, lens, starts, lens, blocks, window, queries, tokens)
        q = empty(tokens, num_heads, head_size, dtype=dtype)
        cache = empty(64, 2, kv_heads, 16, head_size, dtype=dtype)
        paged_attention(q, cache, batch, head_size**-0.5, softcap, empty(num_heads) if sinks else None, table=table)

    return launch


def latent_attention() -> None:
    """DeepSeek V3's: 16 heads of a rank, 64 rotated elements and a latent of 512."""
    lens, starts, blocks = (empty(*size, dtype=torch.int32) for size in ((64,), (65,), (257, 2048)))
    batch = DeviceBatch(16, lens, starts, lens, blocks, None, 1, 64)
    paged_attention(empty(64, 16, 576), empty(64, 1, 1, 16, 576), batch, 0.1, value_size=512)


EIGHT_B = (32, 8, 128)
LAUNCHES: list[Callable[[], None]] = [
    *aot_dense.LAUNCHES,
    *aot_sampling.LAUNCHES,
    steps,
    latent_attention,
    attention(EIGHT_B, 512, 1, 512),
    attention(EIGHT_B, 9, 2048, 2048),
    attention(EIGHT_B, 9, 2048, 2048, table=invariant_launches),
    attention((64, 8, 64), 9, 2048, 2048, window=128, sinks=True),
    attention((8, 4, 256), 9, 2048, 2048, window=4096, softcap=50.0),
]

WIDE = [
    attention((8, 4, head_size), 9, 2048, 2048, table=table, dtype=torch.float32)
    for head_size in (64, 128, 256)
    for table in (fast_launches, invariant_launches)
]
"""Float32, for comparisons: it spills registers, and must fit all the same."""

if __name__ == "__main__":
    with compile_only("sm_90") as compiled:
        for launch in LAUNCHES:
            launch()
        shipped = len(compiled)
        for tokens in (1, 17):
            for again in aot_dense.LAUNCHES:
                again(tokens)
        aot_sampling.parts()
        narrow = len(compiled)
        for launch in WIDE:
            launch()
    for at, kernel in enumerate(compiled):
        registers, stack = kernel.usage()
        took = {"registers": registers, "stack": stack, "shared": kernel.shared}
        if kernel.name.startswith("paged_attention_long"):  # to disassemble all takes longer than to compile them
            took["wgmma"] = "HGMMA" in kernel.assembly()
        print(json.dumps({"name": kernel.name, "late": shipped <= at < narrow, "wide": at >= narrow, **took}))
