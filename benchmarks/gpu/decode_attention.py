"""Decode attention over one layer's cache: how near it comes to a kernel that only reads."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from gpu.attention_peers import Peers, beside, decode_peers
from gpu.clock import Clock, CudaClock
from gpu.figures import Row, attention_bytes, mixed_lengths
from gpu.read_stream import read_stream
from penstock.kernels.paged_attention.device_batch import DeviceBatch
from penstock.kernels.paged_attention.launch import AttentionShape
from penstock.kernels.paged_attention.prefix import pays
from penstock.kernels.prepare_kv.cache_rows import to_rows

HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 32, 8, 128, 16
"""Of an 8B model."""
STREAM_BYTES = 1 << 30
EIGHT_BITS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8_per_token_head": torch.int8}
"""Dtypes of `--kv-cache-dtype`."""

SHARED = [(8, 512), (16, 1024), (16, 4096), (64, 1024), (64, 4096), (256, 2048)]
"""Requests, and tokens of a prefix that all of them share: about where it begins to pay, and well beyond."""
OWN = 128
"""Tokens of each request after that."""

Attend = Callable[[torch.Tensor, torch.Tensor, DeviceBatch, float], torch.Tensor]


class Case(NamedTuple):
    """A batch of one query each."""

    name: str
    lengths: list[int]
    gated: bool
    """Whether the figure's value is taken from it."""


CASES = [
    Case("64 x 4,096", [4096] * 64, True),
    Case("64 of very different lengths, as many together", mixed_lengths(64, 64 * 4096), True),
    Case("256 x 1,024", [1024] * 256, True),
    Case("1 x 1,024", [1024], False),
    Case("1 x 8,192", [8192], False),
    Case("1 x 131,072", [131_072], False),
]


def batch_of(lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, DeviceBatch]:
    """Queries, a cache whose blocks lie in random order, and the batch that names them."""
    counts = [-(-length // BLOCK) for length in lengths]
    order = np.random.default_rng(0).permutation(np.arange(1, sum(counts) + 1)).astype(np.int32)
    table = np.zeros((len(lengths), max(counts)), np.int32)
    begin = 0
    for row, count in enumerate(counts):
        table[row, :count] = order[begin : begin + count]
        begin += count
    cache = torch.randn(sum(counts) + 1, 2, KV_HEADS, BLOCK, HEAD_SIZE, dtype=dtype, device=device)
    q = torch.randn(len(lengths), HEADS, HEAD_SIZE, dtype=dtype, device=device)
    starts = np.arange(len(lengths) + 1, dtype=np.int32)
    return q, cache, DeviceBatch.from_host(starts, np.array(lengths, np.int32), table, BLOCK, device=device)


def measure_case(case: Case, attend: Attend, clock: Clock, stream: float, peers: Callable[..., Peers], dtype: torch.dtype) -> Row:
    """Ours and the others', as shares of `stream` bytes a second."""
    q, cache, batch = batch_of(case.lengths, clock.device, dtype)
    scale, size = HEAD_SIZE**-0.5, attention_bytes(case.lengths, KV_HEADS, HEAD_SIZE, dtype.itemsize)
    seconds = clock.seconds(lambda: attend(q, cache, batch, scale))
    row: Row = {"case": case.name, "us": 1e6 * seconds, "bytes": size, "share_of_stream": size / seconds / stream}
    others = peers(q, cache, batch.block_table, batch.seq_lens, scale)
    row["peers"] = beside(others, clock, seconds, lambda theirs: {"us": 1e6 * theirs})
    if case.gated:
        row["eight_bits"] = eight_bits(seconds, attend, clock, q, cache, batch, scale)
    return row


def eight_bits(seconds: float, attend: Attend, clock: Clock, q: torch.Tensor, cache: torch.Tensor, *step: Any) -> Row:
    """By dtype of a cache of the same tokens in eight bits: how many times as fast it is attended as in `seconds`."""
    found: Row = {}
    for name, dtype in EIGHT_BITS.items():
        kept = to_rows(cache, dtype)
        theirs = clock.seconds(lambda kept=kept: attend(q, kept, *step))
        found[name] = {"us": 1e6 * theirs, "times_as_fast": seconds / theirs}
    return found


def shared_prefix(requests: int, shared: int, attend: Attend, clock: Clock, dtype: torch.dtype) -> Row:
    """How many times as fast a step is attended that reads its prefix once, and whether the engine would."""
    q, cache, batch = batch_of([shared + OWN] * requests, clock.device, dtype)
    batch.block_table[:, : shared // BLOCK] = batch.block_table[:1, : shared // BLOCK].clone()
    apart = replace(batch, shared=torch.tensor([shared], dtype=torch.int32, device=clock.device))
    each, once = (clock.seconds(lambda step=step: attend(q, cache, step, HEAD_SIZE**-0.5)) for step in (batch, apart))
    chosen = pays(AttentionShape(HEADS, KV_HEADS, HEAD_SIZE, dtype.itemsize), cache[0, :, :, 0].nbytes, requests, shared)
    row: Row = {"requests": requests, "shared": shared, "us": 1e6 * once, "us_each": 1e6 * each}
    return row | {"times_as_fast": each / once, "chosen": chosen}


def measure(
    device: str = "cuda",
    *,
    cases: Sequence[Case] = tuple(CASES),
    prefixes: Sequence[tuple[int, int]] = tuple(SHARED),
    attend: Attend | None = None,
    clock: Clock | None = None,
    stream_bytes: int = STREAM_BYTES,
    peers: Callable[..., Peers] = decode_peers,
    dtype: torch.dtype = torch.bfloat16,
) -> Row:
    """The figure's value is the least share, in per cent, of the cases with a gigabyte of keys and values."""
    clock = clock or CudaClock()
    attend = attend or triton_attend()
    stream = stream_bytes / _stream_s(clock, stream_bytes)
    rows = [measure_case(case, attend, clock, stream, peers, dtype) for case in cases]
    worst = min((row for row, case in zip(rows, cases, strict=True) if case.gated), key=lambda row: row["share_of_stream"])
    return {
        "value": 100 * worst["share_of_stream"],
        "bound_by": f"{worst['case']}: {worst['bytes'] / worst['us'] / 1e6:.2f} TB/s of a stream's {stream / 1e12:.2f}",
        "stream_bytes_per_s": stream,
        "rows": rows,
        "shared_prefixes": [shared_prefix(*of, attend, clock, dtype) for of in prefixes],
    }


def _stream_s(clock: Clock, size: int) -> float:
    numbers = torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device=clock.device)
    return clock.seconds(lambda: read_stream(numbers))


def triton_attend() -> Attend:
    """The engine's own kernel, with the launches and the workspace that it would be given."""
    from penstock.kernels.paged_attention.launch import AttentionWorkspace, fast_launches
    from penstock.kernels.paged_attention.prefix import PrefixWorkspace
    from penstock.kernels.paged_attention.triton import paged_attention

    workspaces: dict[tuple[int, int, int], tuple[AttentionWorkspace, PrefixWorkspace]] = {}

    def attend(q: torch.Tensor, cache: torch.Tensor, batch: DeviceBatch, scale: float) -> torch.Tensor:
        key = (batch.num_requests, batch.num_tokens, batch.block_table.shape[1] * batch.block_size)
        if key not in workspaces:
            shape = AttentionShape(q.shape[1], cache.shape[2], q.shape[2], q.element_size())
            own = AttentionWorkspace.sized(shape, fast_launches, *key, str(q.device))
            workspaces[key] = own, PrefixWorkspace.sized(shape, key[0], key[2], q.device)
        workspace, prefix = workspaces[key]
        return paged_attention(q, cache, batch, scale, workspace=workspace, prefix=prefix)

    return attend
