"""The verdict of `/live`."""

from typing import Any

from penstock.api.load_report import LoadReport, WaitingReason
from penstock.engine.frontend.progress import Progress
from penstock.engine.stats import CoreStats


def stats(steps: int, waiting: dict[WaitingReason, int] | None = None, **state: Any) -> CoreStats:
    return CoreStats(LoadReport(epoch=1, seq=1, num_requests_waiting=waiting or {}), steps, 0, 0, 0, **state)


def test_silence_is_stuck_whether_idle_or_not() -> None:
    progress = Progress(0.0, 30.0)
    assert progress.stuck(working=False, now=29.0) is None
    assert "said nothing for 31 s: it hangs after step 0" in str(progress.stuck(working=False, now=31.0))
    progress.heard(31.0)
    assert progress.stuck(working=False, now=60.0) is None


def test_reports_without_steps_are_stuck_only_while_there_is_work() -> None:
    progress = Progress(0.0, 30.0)
    for second in range(60):
        progress.stats(stats(5), working=False, now=float(second))
    assert progress.stuck(working=False, now=59.0) is None
    for second in range(60, 100):
        progress.stats(stats(5), working=True, now=float(second))
    assert "no step for 40 s after step 5" in str(progress.stuck(working=True, now=99.0))
    progress.stats(stats(6), working=True, now=100.0)
    assert progress.stuck(working=True, now=101.0) is None


def test_a_core_that_is_paused_or_carries_out_a_command_is_not_stuck() -> None:
    progress = Progress(0.0, 30.0)
    for second in range(50):
        progress.stats(stats(5, paused=True), working=True, now=float(second))
    assert progress.stuck(working=True, now=50.0) is None
    progress.stats(stats(5, command="reload_weights"), working=True, now=50.0)
    assert progress.stuck(working=True, now=500.0) is None
    progress.stats(stats(5), working=True, now=501.0)
    assert progress.stuck(working=True, now=502.0) is None
    assert "said nothing" in str(progress.stuck(working=True, now=602.0))


def test_requests_that_wait_for_others_than_the_core_are_not_its_fault() -> None:
    progress = Progress(0.0, 30.0)
    for second in range(50):
        progress.stats(stats(5, {"streaming": 2}), working=True, now=float(second))
    assert progress.stuck(working=True, now=50.0) is None
    for second in range(50, 90):
        progress.stats(stats(5, {"streaming": 1, "capacity": 1}), working=True, now=float(second))
    assert "no step" in str(progress.stuck(working=True, now=90.0))
