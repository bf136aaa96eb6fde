"""What benchmarks read of processes."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from procfs import TICKS, children, cpu_s, cpu_times, memory_bytes


def test_time_and_memory_are_those_that_the_kernel_tells_by_other_ways() -> None:
    pid, before, floor = os.getpid(), os.times(), cpu_times(os.getpid())
    while cpu_s(pid) < sum(floor[:2]) + 3 / TICKS:
        pass
    after = os.times()
    assert sum(after[:2]) - sum(before[:2]) >= 2 / TICKS
    assert all(low <= now <= high + 2 / TICKS for low, now, high in zip(floor, cpu_times(pid), os.times()[:4], strict=True))
    assert 0 < memory_bytes(pid) <= memory_bytes(pid, "VmHWM")


def test_children_of_every_thread_are_there_until_they_have_ended() -> None:
    started: list[subprocess.Popen[bytes]] = []
    ended = threading.Event()

    def start() -> None:
        started.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE))

    start()
    thread = threading.Thread(target=lambda: (start(), ended.wait()))
    thread.start()
    while len(started) < 2:
        thread.join(0.01)
    assert {one.pid for one in started} <= set(children(os.getpid()))
    for one in started:
        one.communicate()
    ended.set()
    thread.join()
    assert not {one.pid for one in started} & set(children(os.getpid()))


def test_a_thread_that_ends_while_its_children_are_read_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As threads do that were joined a moment ago."""
    glob = Path.glob

    def with_one_that_is_gone(folder: Path, pattern: str) -> list[Path]:
        return [folder / "0/children", *glob(folder, pattern)]

    monkeypatch.setattr(Path, "glob", with_one_that_is_gone)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as one:
        assert one.pid in children(os.getpid())
