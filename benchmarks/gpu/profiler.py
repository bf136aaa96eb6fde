"""What torch's profiler says of the device: a second opinion on the engine's own clock."""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Profile(NamedTuple):
    """Of some work, in seconds."""

    busy_s: float
    """Together, of the time that any kernel or copy ran."""
    span_s: float
    """From the first one's begin to the last one's end."""
    kernels: int


def union_s(intervals: list[tuple[float, float]]) -> float:
    """The time that any of some intervals (begin, end) covers."""
    covered, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


def profile(work: Callable[[], object]) -> Profile:
    """Runs the work once and says what the device did meanwhile."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        work()
        torch.cuda.synchronize()
    intervals = [
        (event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        for event in profiler.events()
        if event.device_type is torch.autograd.DeviceType.CUDA
    ]
    if not intervals:
        raise RuntimeError("the profiler saw no kernel")
    span = max(end for _, end in intervals) - min(begin for begin, _ in intervals)
    return Profile(union_s(intervals), span, len(intervals))
