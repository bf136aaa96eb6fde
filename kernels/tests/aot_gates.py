"""Compiles the Triton operations for sm_90 as a model of 8 billion parameters launches them, and prints what each kernel takes.

    python kernels/tests/aot_gates.py            one line of JSON a variant: name, registers, stack, shared memory, and of
                                                 attention how deep its pipeline is and which products it takes
    python kernels/tests/aot_gates.py families   the same of attention as other models and steps launch it

A program of its own, since a process interprets Triton's kernels or compiles them, never both.
"""

import itertools
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace

import aot_dense
import aot_sampling
import torch
from aot_dense import empty

from penstock.kernels.compile_only import CompiledKernel, compile_only
from penstock.kernels.paged_attention.device_batch import DeviceBatch
from penstock.kernels.paged_attention.launch import LaunchTable, fast_launches, gluon_launches, invariant_launches
from penstock.kernels.paged_attention.triton import paged_attention
from penstock.kernels.prepare_kv.cache_rows import FLOATS_OF_EIGHT_BITS, row_size
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
    step = StepRequest(ints(256), ints(257), ints(256), ints(1), ints(1))
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
    block_size: int = 16,
    table: LaunchTable = fast_launches,
    dtype: torch.dtype = torch.bfloat16,
    kept: torch.dtype | None = None,
    shares: bool = False,
) -> Callable[[], None]:
    """Of query heads, key heads and head size: a step of so many requests and tokens, with so many queries a request at most.
    `kept`: the cache's dtype, of eight bits; None: that of the queries. `shares`: with a prefix of all requests."""

    def launch() -> None:
        num_heads, kv_heads, head_size = heads
        lens, starts, blocks = (empty(*size, dtype=torch.int32) for size in ((requests,), (requests + 1,), (257, 2048)))
        batch = DeviceBatch(block_size, lens, starts, lens, blocks, window, queries, tokens)
        if shares:
            batch = replace(batch, shared=empty(1, dtype=torch.int32))
        q = empty(tokens, num_heads, head_size, dtype=dtype)
        cache = empty(64, 2, kv_heads, block_size, row_size(head_size, kept or dtype), dtype=kept or dtype)
        of_heads = empty(num_heads) if sinks else None
        scales = empty(2, kv_heads, dtype=torch.float32) if kept in FLOATS_OF_EIGHT_BITS else None
        paged_attention(q, cache, batch, head_size**-0.5, softcap, of_heads, table=table, scales=scales)

    return launch


def latent_attention() -> None:
    """DeepSeek V3's: 64 rotated elements and a latent of 512; 16 heads, those of a rank, in bfloat16 and E4M3, and all 128."""
    lens, starts, blocks = (empty(*size, dtype=torch.int32) for size in ((64,), (65,), (257, 2048)))
    batch = DeviceBatch(16, lens, starts, lens, blocks, None, 1, 64)
    for kept, scales in ((torch.bfloat16, None), (torch.float8_e4m3fn, empty(2, 1, dtype=torch.float32))):
        cache = empty(64, 1, 1, 16, 576, dtype=kept)
        paged_attention(empty(64, 16, 576), cache, batch, 0.1, value_size=512, scales=scales)
    paged_attention(empty(64, 128, 576), empty(64, 1, 1, 16, 576), batch, 0.1, value_size=512)


EIGHT_B = (32, 8, 128)
LAUNCHES: list[Callable[[], None]] = [
    *aot_dense.LAUNCHES,
    *aot_sampling.LAUNCHES,
    steps,
    latent_attention,
    attention(EIGHT_B, 512, 1, 512),
    attention(EIGHT_B, 9, 2048, 2048),
    attention(EIGHT_B, 1, 100, 100),
    attention(EIGHT_B, 9, 2048, 2048, table=invariant_launches),
    attention(EIGHT_B, 9, 2048, 2048, table=gluon_launches),
    attention((32, 8, 64), 9, 2048, 2048, table=gluon_launches, block_size=32),
    attention(EIGHT_B, 64, 1, 64, shares=True),
    attention(EIGHT_B, 512, 1, 512, kept=torch.float8_e4m3fn),
    attention(EIGHT_B, 9, 2048, 2048, kept=torch.float8_e4m3fn),
    attention(EIGHT_B, 9, 2048, 2048, kept=torch.int8),
]

WIDE = {
    f"float32, heads of {head_size}, {table.__name__}": attention(
        (8, 4, head_size), 9, 2048, 2048, table=table, dtype=torch.float32
    )
    for head_size in (64, 128, 256)
    for table in (fast_launches, invariant_launches)
}
"""Float32, for comparisons: it spills registers, and must fit all the same."""

FAMILIES = {
    "Gemma 3 27B, decodes within a window": attention((32, 16, 128), 512, 1, 512, window=1024),
    "Gemma 3 12B, few decodes within a window": attention((16, 8, 256), 8, 1, 8, window=1024),
    "Gemma 3 12B, 16 drafts": attention((16, 8, 256), 8, 16, 128, window=1024),
    "8 billion parameters, a prefix of many decodes": attention(EIGHT_B, 512, 1, 512, shares=True),
    "8 billion parameters, a prefix of few decodes": attention(EIGHT_B, 8, 1, 8, shares=True),
    "Gemma 2 9B, a prefix behind softcaps": attention((16, 8, 256), 64, 1, 64, softcap=50.0, shares=True),
    "8 billion parameters, few decodes": attention(EIGHT_B, 8, 1, 8),
    "8 billion parameters, 8 drafts": attention(EIGHT_B, 8, 8, 64),
    "8 billion parameters, 16 drafts": attention(EIGHT_B, 8, 16, 128),
    "8 billion parameters, blocks of 64": attention(EIGHT_B, 512, 1, 512, block_size=64),
    "gpt-oss, sinks within a window": attention((64, 8, 64), 9, 2048, 2048, window=128, sinks=True),
    "Gemma 2 9B, softcaps within a window": attention((8, 4, 256), 9, 2048, 2048, window=4096, softcap=50.0),
    "Qwen2 7B, blocks of 128": attention((28, 4, 128), 9, 2048, 2048, block_size=128),
    "Phi 3, heads of 96": attention((32, 32, 96), 9, 2048, 2048),
    "E5M2, groups of 8, blocks of 64": attention((64, 8, 128), 9, 2048, 2048, block_size=64, kept=torch.float8_e5m2),
    "E4M3 beside float16": attention(EIGHT_B, 9, 2048, 2048, dtype=torch.float16, kept=torch.float8_e4m3fn),
    "int8 beside float16, 8 drafts": attention(EIGHT_B, 8, 8, 64, dtype=torch.float16, kept=torch.int8),
    "Gemma 3 12B, E4M3 within a window": attention((16, 8, 256), 9, 2048, 2048, window=1024, kept=torch.float8_e4m3fn),
    "Gemma 3 12B, batch-invariant": attention((16, 8, 256), 9, 2048, 2048, window=1024, table=invariant_launches),
    "gpt-oss, int8, sinks within a window": attention((64, 8, 64), 9, 2048, 2048, window=128, sinks=True, kept=torch.int8),
}
"""Attention as steps and models launch it that are not in the above."""


def _pipeline(assembly: str) -> dict[str, object]:
    """How many loads may still be on their way when a loop begins to multiply, of its loops the least; which products; and how
    many numbers are widened one by one: read from shared memory so (LDS.U8), or converted so (F2F, half a warp at a time); and
    the first instruction that touches memory, branches, or waits for other kernels (ACQBULK)."""
    seen = re.findall(r"DEPBAR\.LE SB0, 0x(\w+)|(HGMMA|HMMA)", assembly)
    first = re.search(r"\b(ACQBULK|LDG|LDGSTS|STG|ATOM\w*|RED|BRA)\b", assembly)
    waits = [int(wait, 16) for (wait, _), (_, then) in itertools.pairwise(seen) if wait and then]
    return {
        "depth": min(waits, default=0),
        "wgmma": "HGMMA" in assembly,
        "single": len(re.findall(r"LDS\.U8|F2F\.", assembly)),
        "first": first and first[0],
    }


def _ahead(assembly: str) -> int:
    """How many loads may still be on their way when others have arrived, of all waits the most; 0 where each is waited for."""
    return max((int(left, 16) for left in re.findall(r"DEPBAR\.LE SB0, 0x(\w+)", assembly)), default=0)


def _waits(ptx: str) -> bool:
    """Whether a kernel begins by waiting for those before it: nothing of memory is read or written before, no path leads around
    it, and only then may others begin."""
    before, _, after = ptx.partition("griddepcontrol.wait")
    touched = re.search(r"\b(ld\.(?!param)|st\.|cp\.|atom|red\.|bra\b|ret\b|launch_dependents)", before)
    return touched is None and "griddepcontrol.launch_dependents" in after


def _arrive_together(ptx: str) -> bool:
    """Whether all warps of a warpgroup have waited for their products before one of them says that a slot is free."""
    events = re.findall(r"wgmma\.wait_group|bar\.sync|mbarrier\.arrive\.shared", ptx)
    arrivals = [before for before, event in itertools.pairwise(events) if event.startswith("mbarrier")]
    return bool(arrivals) and set(arrivals) == {"bar.sync"}


def _took(kernel: CompiledKernel) -> dict[str, object]:
    registers, stack = kernel.usage()
    took: dict[str, object] = {"name": kernel.name, "registers": registers, "stack": stack, "shared": kernel.shared}
    ptx = kernel.ptx.read_text()
    took |= {"waits": _waits(ptx), "prefetches": ptx.count("prefetch.global")}
    if kernel.name.startswith(
        ("paged_attention_", "_prefix_attention", "latent_attention", "_few_rows")
    ):  # to disassemble all takes longer than to compile them
        took |= _pipeline(kernel.assembly())
    if kernel.name == "_gluon_attention_kernel":
        assembly = kernel.assembly()
        took |= {name: assembly.count(name) for name in ("HGMMA", "UTMALDG", "USETMAXREG")}
        took |= {"together": _arrive_together(ptx), "beside": assembly.count("WARPGROUP.DEPBAR.LE gsb0, 0x1")}
    if kernel.name == "wide_kernel":
        took["ahead"] = _ahead(kernel.assembly())
    return took


def _families() -> None:
    for case, launch in (FAMILIES | WIDE).items():
        with compile_only("sm_90") as compiled:
            launch()
        for kernel in compiled:
            print(json.dumps({"case": case, "wide": case in WIDE, **_took(kernel)}))


def _shipped() -> None:
    with compile_only("sm_90") as compiled:
        for launch in LAUNCHES:
            launch()
        shipped = len(compiled)
        for tokens in (1, 17):
            for again in aot_dense.LAUNCHES:
                again(tokens)
        aot_sampling.parts()
    for at, kernel in enumerate(compiled):
        print(json.dumps({"late": at >= shipped, **_took(kernel)}))


if __name__ == "__main__":
    _families() if sys.argv[1:] == ["families"] else _shipped()
