"""The device's ceilings are measured, not looked up."""

from contextlib import nullcontext

import pytest
import torch

from penstock.engine.runner.device import ceilings
from penstock.engine.runner.device.ceilings import measure_ceilings


class Host:
    """This machine as a device, and a clock that its work moves."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.calls = 0

    def main_stream(self):
        return nullcontext()

    def synchronize(self):
        self.calls += 1

    def return_free_memory(self):
        self.calls += 100


def test_bytes_count_both_ways_and_operations_twice(monkeypatch):
    clock = iter([0.0, 0.5, 10.0, 14.0])
    monkeypatch.setattr(ceilings.time, "perf_counter", lambda: next(clock))
    host = Host()
    found = measure_ceilings(host, torch.float32, copy_bytes=1000, product=16, repeats=2)
    assert found.bytes_per_s == pytest.approx(2 * 1000 * 2 / 0.5)
    assert found.flops_per_s == pytest.approx(2 * 16**3 * 2 / 4.0)
    assert host.calls == 104, "the device has nothing to do when a clock is read, and the memory is given back"


@pytest.mark.gpu
@pytest.mark.req("PERF-02")
def test_a_real_device_is_within_what_any_can_do():
    from penstock.engine.runner.device.runtime import CudaRuntime

    found = measure_ceilings(CudaRuntime(), torch.bfloat16)
    assert 0.1e12 < found.bytes_per_s < 20e12 and 10e12 < found.flops_per_s < 10_000e12
    assert 20 < found.balance_point < 2000
