"""What the device reaches, measured at start: a copy and a matrix product, each large enough that nothing else counts."""

import time
from collections.abc import Callable

import torch

from penstock.engine.roofline import Ceilings
from penstock.engine.runner.device.runtime import DeviceRuntime

COPY_BYTES = 1 << 30
PRODUCT = 8192
"""Rows and columns of the matrices."""
REPEATS = 8


def measure_ceilings(
    runtime: DeviceRuntime, dtype: torch.dtype, copy_bytes: int = COPY_BYTES, product: int = PRODUCT, repeats: int = REPEATS
) -> Ceilings:
    """Takes a tenth of a second, and memory that is given back.

    Args:
        runtime: The device, with nothing to do.
        dtype: Of the matrices.
        copy_bytes: Copied at once; several times what caches hold.
        product: Size of the matrices.
        repeats: Of each; the mean counts.
    """
    with runtime.main_stream():
        copy_s, product_s = _copy_s(runtime, copy_bytes, repeats), _product_s(runtime, dtype, product, repeats)
    runtime.return_free_memory()
    return Ceilings(bytes_per_s=2 * copy_bytes / copy_s, flops_per_s=2 * product**3 / product_s)


def _copy_s(runtime: DeviceRuntime, size: int, repeats: int) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=runtime.device)
    target = torch.empty_like(source)
    return _seconds(runtime, lambda: target.copy_(source), repeats)


def _product_s(runtime: DeviceRuntime, dtype: torch.dtype, size: int, repeats: int) -> float:
    # Not zeros: they would draw less power, and run faster than any model.
    left, right = (torch.randn(size, size, dtype=dtype, device=runtime.device) for _ in range(2))
    out = torch.empty_like(left)
    return _seconds(runtime, lambda: torch.mm(left, right, out=out), repeats)


def _seconds(runtime: DeviceRuntime, work: Callable[[], object], repeats: int) -> float:
    work()
    runtime.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    runtime.synchronize()
    return (time.perf_counter() - start) / repeats
