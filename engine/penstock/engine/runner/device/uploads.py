"""Arrays that only one step wants on the device: all of them in one copy, from pinned memory that is used once."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.runner.device.runtime import Copies
from penstock.engine.runner.device.staging import aligned


def upload(runtime: Copies, *arrays: npt.NDArray[Any]) -> list[torch.Tensor]:
    """The arrays, of int32, int64 or float32, on the device; the host does not wait.

    Pinned memory comes from torch, which gives it to nobody else before the copy is over.
    """
    if runtime.shares_memory:
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    flat = [np.ascontiguousarray(array).reshape(-1).view(np.int32) for array in arrays]
    # Whatever their lengths are, kernels are launched with the alignment that they were compiled for.
    starts = np.cumsum([0, *(aligned(len(numbers)) for numbers in flat)])
    page = runtime.pinned(int(starts[-1]))
    host, there = page.numpy(), torch.empty(len(page), dtype=torch.int32, device=runtime.device)
    for start, numbers in zip(starts[:-1].tolist(), flat, strict=True):
        host[start : start + len(numbers)] = numbers
    if len(page):
        runtime.upload(page, there)
    return [
        there[start : start + len(numbers)].view(torch.from_numpy(array).dtype).view(array.shape)
        for start, numbers, array in zip(starts[:-1].tolist(), flat, arrays, strict=True)
    ]
