"""A device's account over a start."""

from collections import deque

import numpy as np
import pytest
import torch

from penstock.engine.attention.backends.interface import StepLengths
from penstock.engine.config import CacheConfig, ConfigError
from penstock.engine.runner.device.memory import DeviceAccount
from penstock.engine.runner.device.runtime import DeviceMemory
from penstock.kernels.paged_attention.launch import SMALL_ROWS

TOTAL = 1_000_000


class Device:
    """The memory of a device, as numbers: what others have, what torch holds and hands out, and what libraries take."""

    def __init__(self, others: int = 0) -> None:
        self.others, self.library, self.tensors, self.cached, self.peak = others, 20_000, 0, 0, 0

    def allocate(self, size: int) -> None:
        self.tensors += size
        self.cached = max(0, self.cached - size)
        self.peak = max(self.peak, self.tensors)

    def free(self, size: int) -> None:
        self.tensors -= size
        self.cached += size

    def memory(self) -> DeviceMemory:
        reserved = self.tensors + self.cached
        return DeviceMemory(TOTAL, TOTAL - self.others - self.library - reserved, self.tensors, reserved, self.peak)

    def reset_peak(self) -> None:
        self.peak = self.tensors

    def return_free_memory(self) -> None:
        self.cached = 0

    def synchronize(self) -> None:
        pass


def start(device: Device) -> DeviceAccount:
    """To the point where the cache is sized: weights of 300,000 that were staged through 50,000 more."""
    account = DeviceAccount(device, CacheConfig())
    device.allocate(350_000)
    device.free(50_000)
    return account


def step(device: Device) -> None:
    """150,000 at once, and then less; the first one has a library keep 10,000."""
    device.library = 30_000
    device.allocate(100_000)
    device.allocate(50_000)
    device.free(150_000)
    device.allocate(20_000)
    device.free(20_000)


@pytest.mark.req("MEM-01", "MEM-02")
def test_weights_libraries_and_the_largest_step_are_told_apart():
    device = Device()
    account = start(device)
    assert account.peak_of(lambda: step(device)) == 150_000
    memory = account.measure(graphs=7_000)
    assert memory.own == 300_000 + 10_000, "weights, and what the first step made a library take"
    assert (memory.total, memory.at_start, memory.graphs) == (TOTAL, 980_000, 7_000)
    assert memory.free == TOTAL - 30_000 - 300_000, "nothing of the step or of the staging is still held"


@pytest.mark.req("MEM-03")
def test_what_others_take_counts_and_what_they_give_back_is_not_ours():
    device = Device()
    account = start(device)
    account.peak_of(lambda: step(device))
    device.others = 100_000
    assert account.measure().own == 410_000
    crowded = Device(others=80_000)
    account = start(crowded)
    account.peak_of(lambda: step(crowded))
    crowded.others = 0
    assert account.measure().own == 300_000, "at least what torch holds"
    with pytest.raises(ConfigError, match="only 780,000 are free before anything is loaded: others use 220,000"):
        DeviceAccount(Device(others=200_000), CacheConfig())


@pytest.mark.gpu
@pytest.mark.req("MEM-01", "MEM-03")
def test_a_real_device_tells_a_peak_from_what_stays():
    from penstock.engine.runner.device.runtime import CudaRuntime

    runtime = CudaRuntime()
    account = DeviceAccount(runtime, CacheConfig(memory_utilization=0.1))
    held: deque[torch.Tensor] = deque()
    held.append(torch.zeros(64 << 20, dtype=torch.uint8, device=runtime.device))
    peak = account.peak_of(lambda: torch.zeros(32 << 20, dtype=torch.uint8, device=runtime.device).zero_())
    assert 32 << 20 <= peak < 34 << 20
    memory = account.measure()
    assert 64 << 20 <= memory.own < 200 << 20
    assert memory.at_start is not None and memory.at_start - memory.free <= memory.own


def test_the_warm_up_runs_a_prompt_that_is_too_long_for_a_decodes_kernel(checkpoint, build_device_runner, monkeypatch) -> None:
    runner = build_device_runner(checkpoint("llama"))
    begun, begin_step = [], runner.attention.begin_step

    def note(lengths: StepLengths) -> None:
        begun.append(np.diff(lengths.query_start_loc))
        begin_step(lengths)

    monkeypatch.setattr(runner.attention, "begin_step", note)
    runner.warm_up()
    assert any(len(step) == 1 and step.max() > SMALL_ROWS for step in begun), "alone"
    assert any(len(step) == 16 and step.max() > SMALL_ROWS for step in begun), "beside decodes"
