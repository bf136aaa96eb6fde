"""CUDA graphs are captured while nobody waits, and every step says how it was launched."""

import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from fake_runner import FakeRunner
from harness import make_config, make_request

from penstock.engine.commands import ResetPrefixCache
from penstock.engine.config import GraphConfig
from penstock.engine.core.core import EngineCore
from penstock.engine.core.executor import InlineExecutor
from penstock.engine.core.ipc.process import IDLE_S, READ_POLL_MS, CoreLoop
from penstock.engine.core.measure.step_meter import StepMeter
from penstock.engine.core.plan import GraphReport, GraphStep, StepPlan, StepResult, empty
from penstock.engine.messages import Control
from penstock.engine.stats import DraftStats, GraphSteps


def make_core(mode="FULL_AND_PIECEWISE") -> tuple[EngineCore, FakeRunner]:
    config = msgspec.structs.replace(make_config(), graphs=GraphConfig(mode=mode, capture_sizes=(1, 2)))
    runner = FakeRunner(config)
    runner.initialize_kv_cache(64)
    return EngineCore(config, InlineExecutor(runner), 64, epoch=1), runner


def test_graphs_are_captured_while_nothing_runs_until_all_are_there() -> None:
    core, runner = make_core()
    core.handle(make_request(0, [1, 2, 3], 3))
    assert not core.may_capture, "a request waits"
    while core.has_work:
        core.step()
    seen = []
    while core.may_capture:
        core.capture_graph()
        seen.append(core.stats().graphs)
    assert seen == [GraphReport(n, 3 - n, 0, 0, 0.0) for n in (1, 2, 3)] and len(runner.captures) == 3


def test_without_graphs_nobody_asks_for_any() -> None:
    core, runner = make_core("NONE")
    assert not core.may_capture and runner.captures == [] and core.stats().graphs is None


def test_after_a_command_it_is_asked_again() -> None:
    core, _ = make_core()
    while core.may_capture:
        core.capture_graph()
    core.handle(Control(1, ResetPrefixCache()))
    while core.has_work:
        core.step()
    assert core.may_capture, "weights or cache may be others now"


def test_the_loop_captures_only_after_a_while_without_work() -> None:
    core, runner = make_core()
    port = SimpleNamespace(poll=lambda patience_ms: time.sleep(patience_ms / 1000), send=lambda _message: None)
    loop = CoreLoop(core, port, None, 60.0)
    core.handle(make_request(0, [1, 2, 3], 5))
    busy = 0.0
    while core.has_work:
        busy = time.monotonic()
        loop.turn()
        assert runner.captures == []
    while core.may_capture:
        loop.turn()
    assert len(runner.captures) == 3 and runner.captures[0] - busy >= IDLE_S


def test_no_graph_holds_up_a_request_that_waits_for_its_grammar(monkeypatch) -> None:
    core, _ = make_core()
    loop = CoreLoop(core, SimpleNamespace(send=lambda _message: None), None, 60.0)
    loop._last_report = time.monotonic()
    assert core.may_capture and loop._patience_ms() > 10 * READ_POLL_MS
    monkeypatch.setitem(core._grammars._compiling, "a grammar", None)
    assert not core.may_capture and loop._patience_ms() == READ_POLL_MS


@pytest.mark.req("SD-25", "SPV-11")
def test_drafts_are_counted_by_position() -> None:
    meter, rows = StepMeter(None, num_drafts=3), np.arange(4, dtype=np.int32)
    drafted, samples = np.array([3, 2, 0, 3], np.int32), np.ones(4, np.bool_)
    plan = StepPlan(0, empty(), [], [], [], rows, 1 + drafted, samples, num_drafts=drafted)
    # All accepted; one of two; none planned; failed, which says nothing.
    meter.retired(plan, StepResult(0, empty(4, 4), np.array([4, 2, 1, 0], np.int32)), 0.01, 12)
    assert meter.stats().drafts == DraftStats(2, [2, 2, 1], [2, 1, 1])
    assert StepMeter(None).stats().drafts is None


@pytest.mark.req("CG-32")
def test_steps_are_counted_by_how_they_were_launched_and_why() -> None:
    meter, none = StepMeter(None), np.zeros(0, np.bool_)
    plan = StepPlan(0, empty(), [], [], [], empty(), empty(), none)
    steps = [
        GraphStep("FULL", "uniform", 3, 4),
        GraphStep("FULL", "uniform", 8, 8),
        GraphStep("NONE", "too_large", 600, 600),
        None,
    ]
    for graph in steps:
        meter.retired(plan, StepResult(0, empty(0, 1), empty(), graph=graph), 0.01, 0)
    assert meter.stats().graphs == [GraphSteps("FULL", "uniform", 2, 11, 1), GraphSteps("NONE", "too_large", 1, 600, 0)]
