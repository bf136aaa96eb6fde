"""Other entries for the launch tables of attention: `python -m gpu.sweep decode|prefill`; a line of JSON for each that was tried.

The tables of `penstock.kernels.paged_attention.launch` were made without a device. This tries their neighbours on one. A person
writes what is best, by head size, into the tables.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import torch

from gpu.clock import Clock, CudaClock, HostClock
from gpu.decode_attention import BLOCK
from gpu.figures import Row
from penstock.kernels.paged_attention.device_batch import DeviceBatch
from penstock.kernels.paged_attention.launch import AttentionShape, Launch, LaunchTable, fast_launches

SHAPES = {128: (32, 8), 256: (16, 8), 64: (32, 8)}
"""Query and key heads by head size: of Llama and Qwen, of Gemma, of small models."""
BATCHES = ((64, 4096), (8, 1024), (1, 32_768))
"""Requests and keys of each that decode."""
PROMPTS = ((1, 8192, 8192), (1, 128, 32_768))
"""Requests, queries and keys: a long prompt, and a short one behind a cached prefix."""

VARIED = ("tile", "num_warps", "num_stages", "splits", "block_m")

Attend = Callable[..., torch.Tensor]


def neighbours(launch: Launch, decode: bool) -> Iterator[Launch]:
    """The launch as it is, then others with the same tile of rows."""
    yield launch
    tiles = (16, 32, 64, 128)
    splits = sorted({1, max(1, launch.splits // 2), launch.splits, launch.splits * 2} - {64}) if decode else (launch.splits,)
    for warps, stages, tile, split in product((4, 8), (2, 3, 4, 5), tiles, splits):
        other = replace(launch, num_warps=warps, num_stages=stages, tile=tile, splits=split)
        if other != launch:
            yield other


def table_with(launches: tuple[Launch, ...], at: int, launch: Launch) -> LaunchTable:
    """A table that always gives these launches, one of them replaced."""
    replaced = (*launches[:at], launch, *launches[at + 1 :])
    return lambda shape, requests, queries, keys, tokens: replaced


def case_of(
    shape: AttentionShape, requests: int, queries: int, keys: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, DeviceBatch]:
    """Queries, a cache in random order, and the batch: equal requests, whose last tokens are computed."""
    blocks = -(-keys // BLOCK)
    order = np.random.default_rng(0).permutation(np.arange(1, requests * blocks + 1)).astype(np.int32)
    cache = torch.randn(requests * blocks + 1, 2, shape.num_kv_heads, BLOCK, shape.head_size, dtype=dtype, device=device)
    q = torch.randn(requests * queries, shape.num_heads, shape.head_size, dtype=dtype, device=device)
    starts = np.arange(requests + 1, dtype=np.int32) * np.int32(queries)
    lengths = np.full(requests, keys, np.int32)
    return q, cache, DeviceBatch.from_host(starts, lengths, order.reshape(requests, blocks), BLOCK, device=device)


def sweep(
    kind: str,
    attend: Attend,
    clock: Clock,
    cases: Sequence[tuple[int, int, int, int]],
    dtype: torch.dtype,
    most: int | None = None,
) -> Iterator[Row]:
    """A row for each launch that was tried, and after each case the best so far by head size, requests and keys.

    Args:
        kind: `decode` or `prefill`.
        attend: `penstock.kernels.paged_attention.triton.paged_attention`.
        clock: Of the device.
        cases: Head size, requests, queries and keys.
        dtype: Of queries and cache.
        most: Launches of a case at most; None: all.
    """
    best: dict[str, Row] = {}
    for head_size, requests, queries, keys in cases:
        heads, kv_heads = SHAPES[head_size]
        shape = AttentionShape(heads, kv_heads, head_size, dtype.itemsize)
        launches = fast_launches(shape, requests, queries, keys, requests * queries)
        at, name = len(launches) - 1, f"head {head_size}, {requests} x {queries} of {keys}"
        q, cache, batch = case_of(shape, requests, queries, keys, clock.device, dtype)
        arguments, own = (q, cache, batch, head_size**-0.5), None
        for number, launch in enumerate(list(neighbours(launches[at], kind == "decode"))[:most]):
            row: Row = {"case": name, **{key: getattr(launch, key) for key in VARIED}}
            work = partial(attend, *arguments, table=table_with(launches, at, launch))
            try:
                row["us"] = 1e6 * clock.seconds(work, repeats=10)
            except Exception as error:  # noqa: BLE001 (a launch that does not fit the device is a finding)
                row["failed"] = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            else:
                own = row["us"] if number == 0 else own
                if row["us"] < best.get(name, {"us": float("inf")})["us"]:
                    best[name] = row | ({} if own is None else {"own_over_it": own / row["us"]})
            yield {"rows": [row]}
        yield {"best": dict(best)}


def cases(kind: str) -> list[tuple[int, int, int, int]]:
    """Head size, requests, queries and keys of each case, the usual head size first."""
    if kind == "decode":
        return [(head_size, requests, 1, keys) for head_size in SHAPES for requests, keys in BATCHES]
    return [(head_size, *prompt) for head_size in SHAPES for prompt in PROMPTS]


def main(kind: str, dry: bool) -> int:
    """Prints a line for each launch, as it is known."""
    if dry:
        found = sweep(kind, lambda q, *_, **__: q, HostClock(), [(64, 2, 1, 32)], torch.float32, most=3)
    else:
        from penstock.kernels.paged_attention.triton import paged_attention

        found = sweep(kind, paged_attention, CudaClock(), cases(kind), torch.bfloat16)
    for row in found:
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], "--dry-run" in sys.argv))
