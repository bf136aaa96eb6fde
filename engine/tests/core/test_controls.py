"""Pausing, sleeping and reloading, on a core without a process around it."""

from collections import defaultdict

import numpy as np
import pytest
from fake_runner import FakeRunner, reference
from harness import make_config, make_request

from penstock.api.events import AllBlocksCleared
from penstock.engine.commands import (
    Command,
    Pause,
    PinPrefix,
    ReloadWeights,
    ResetPrefixCache,
    Resume,
    Sleep,
    UnpinPrefix,
    WakeUp,
)
from penstock.engine.core.core import EngineCore
from penstock.engine.core.executor import InlineExecutor, ThreadExecutor
from penstock.engine.messages import AbortRequests, Control, ControlDone, Finished


class Engine:
    """A core, what it has said, and its runner."""

    def __init__(self, depth: int) -> None:
        config = make_config(depth=depth)
        self.runner = FakeRunner(config)
        assert config.cache.num_blocks is not None
        self.runner.initialize_kv_cache(config.cache.num_blocks)
        executor = InlineExecutor(self.runner) if depth == 1 else ThreadExecutor(self.runner)
        self.core = EngineCore(config, executor, config.cache.num_blocks, epoch=7)
        self.executor = executor
        self.streams: dict[int, list[int]] = defaultdict(list)
        self.finished: dict[int, Finished] = {}
        self.replies: list[ControlDone] = []
        self._calls = 0

    def add(self, *indexes: int, max_tokens: int = 12) -> None:
        for index in indexes:
            self.core.handle(make_request(index, [index, 1, 2, 3, 4], max_tokens))

    def tell(self, command: Command) -> None:
        """Sends a command; its reply may come later."""
        self.core.handle(Control(self._calls, command))
        self._calls += 1

    def call(self, command: Command) -> str | None:
        """Sends a command and runs until its answer: its error."""
        self.tell(command)
        for _ in range(200):
            self.step()
            if self.replies and self.replies[-1].call_id == self._calls - 1:
                return self.replies[-1].error
        raise AssertionError(f"no answer to {command}")

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            if frame := self.core.step():
                tokens, offsets = np.frombuffer(frame.token_ids, "<i4"), np.frombuffer(frame.offsets, "<i4")
                for at, index in enumerate(np.frombuffer(frame.indexes, "<i8").tolist()):
                    self.streams[index] += tokens[offsets[at] : offsets[at + 1]].tolist()
                self.finished |= {end.index: end for end in frame.finished}
            self.replies += self.core.take_replies()

    def run(self) -> None:
        for _ in range(500):
            if not self.core.has_work:
                self.step()
                return
            self.step()
        raise AssertionError("never done")

    def check_streams(self, *indexes: int) -> None:
        for index in indexes:
            assert self.streams[index] == reference([index, 1, 2, 3, 4], 12)
            assert self.finished[index].error is None


@pytest.fixture(params=[1, 2])
def engine(request):
    one = Engine(request.param)
    yield one
    one.executor.close()


@pytest.mark.req("IPC-04", "SCH-13")
def test_keep_stops_at_once_and_everything_goes_on_after_the_pause(engine):
    engine.add(0, 1)
    engine.step(4)
    assert engine.call(Pause("keep", clear_cache=False)) is None
    assert engine.core.stats().paused and not engine.core.has_work
    held, steps = engine.core.scheduler.kv.pool.num_used, engine.core.num_steps
    engine.add(2)
    engine.step(3)
    assert engine.core.num_steps == steps and held > 0 and not engine.finished
    assert engine.call(Resume()) is None
    engine.run()
    engine.check_streams(0, 1, 2)
    assert not engine.core.stats().paused


def test_a_pin_is_answered_and_ends_with_a_forced_reset(engine):
    engine.add(0)
    engine.run()
    pin = PinPrefix("system", [0, 1, 2, 3, 4])
    assert engine.call(pin) is None and engine.replies[-1].result == {"tokens": "4"}
    assert engine.call(pin) == "there is a pin 'system' already"
    assert engine.call(ResetPrefixCache()) == "the prefix cache was not reset: 0 requests hold blocks, and 1 blocks are pinned"
    assert engine.call(ResetPrefixCache(reset_running_requests=True)) is None
    assert engine.call(UnpinPrefix("system")) == "there is no pin 'system'"
    assert engine.call(pin) == "no block of this prefix is cached: send it first"
    assert engine.core.scheduler.kv.pool.num_used == 0


@pytest.mark.req("IPC-04", "SCH-13")
def test_wait_lets_running_requests_end_and_others_wait_and_says_when(engine):
    engine.add(0, 1)
    engine.step(2)
    engine.tell(Pause("wait"))
    engine.add(2)
    engine.step(2)
    assert not engine.replies and engine.core.has_work
    engine.run()
    assert [reply.error for reply in engine.replies] == [None]
    engine.check_streams(0, 1)
    assert 2 not in engine.streams and not engine.core.has_work and engine.core.stats().paused
    assert not engine.core.scheduler.kv.cached_hashes(), "the cache was to be cleared"
    engine.call(Resume())
    engine.run()
    engine.check_streams(2)


def test_a_resume_overtakes_a_pause_that_waits(engine):
    engine.add(0)
    engine.step(2)
    engine.tell(Pause("wait"))
    assert engine.call(Resume()) is None
    assert "resumed before" in str(engine.replies[0].error) and not engine.core.stats().paused
    engine.run()
    engine.check_streams(0)


def test_wait_lets_requests_end_that_an_earlier_pause_has_stopped(engine):
    engine.add(0, 1)
    engine.step(4)
    engine.call(Pause("keep", clear_cache=False))
    assert engine.call(Pause("wait")) is None
    engine.check_streams(0, 1)
    assert engine.core.stats().paused and not engine.core.has_work


@pytest.mark.parametrize("clear_cache", [False, True])
def test_a_pause_that_waits_is_told_when_another_stops_what_it_waits_for(engine, clear_cache):
    engine.add(0)
    engine.step(2)
    engine.tell(Pause("wait"))
    assert engine.call(Pause("keep", clear_cache)) is None
    assert "another command stopped" in str(engine.replies[0].error) and engine.core.stats().paused
    engine.call(Resume())
    engine.run()
    engine.check_streams(0)


def test_abort_ends_all_with_a_retriable_error(engine):
    engine.add(*range(12))
    engine.step(2)
    assert engine.call(Pause()) is None
    assert {end.code for end in engine.finished.values()} == {"paused"} and len(engine.finished) == 12
    assert engine.core.scheduler.kv.pool.num_used == 0 and not engine.core.scheduler.kv.cached_hashes()
    engine.call(Resume())
    engine.add(20)
    engine.run()
    engine.check_streams(20)


@pytest.mark.req("PC-21")
def test_a_forced_reset_takes_blocks_from_running_requests_which_lose_nothing(engine):
    engine.add(0, 1)
    engine.step(4)
    assert "2 requests hold blocks" in str(engine.call(ResetPrefixCache()))
    engine.core.take_events()
    assert engine.call(ResetPrefixCache(reset_running_requests=True)) is None
    assert AllBlocksCleared() in engine.core.take_events() and engine.core.scheduler.totals.num_preemptions == 2
    engine.run()
    engine.check_streams(0, 1)


@pytest.mark.req("MEM-10", "MEM-09")
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_an_engine_that_sleeps_refuses_and_wakes_without_a_cache(engine, mode):
    engine.add(0)
    engine.run()
    engine.add(1, 2)
    engine.step(2)
    engine.core.take_events()
    assert engine.call(Sleep(1, mode)) is None
    assert engine.runner.awake == {"weights"} and AllBlocksCleared() in engine.core.take_events()
    assert (set(engine.finished) == {0}) == (mode == "keep")
    engine.add(3)
    engine.step()
    assert engine.finished[3].code == "asleep" and "kv_cache and weights must wake up" in str(engine.finished[3].error)
    assert "asleep" in str(engine.call(Resume()))
    assert engine.call(WakeUp(("weights",))) is None
    assert engine.core.stats().asleep == "the engine is asleep: kv_cache must wake up" and not engine.core.has_work
    assert engine.call(WakeUp()) is None
    assert engine.core.stats().asleep is None and not engine.core.stats().paused
    hits = engine.core.scheduler.totals.prefix_hits
    engine.add(4)
    engine.core.handle(make_request(5, [0, 1, 2, 3, 4], 12))
    engine.run()
    engine.check_streams(4, *([] if mode == "abort" else [1, 2]))
    assert engine.streams[5] == reference([0, 1, 2, 3, 4], 12)
    assert engine.core.scheduler.totals.prefix_hits == hits, "nothing cached before is found after"


@pytest.mark.req("MEM-07")
def test_after_level_2_the_weights_must_be_reloaded(engine):
    assert engine.call(Sleep(2)) is None and engine.runner.awake == set()
    assert "wake them up before" in str(engine.call(ReloadWeights()))
    assert engine.call(WakeUp()) is None
    assert engine.core.stats().asleep == "the engine has no weights: they must be reloaded"
    engine.add(0)
    engine.step()
    assert engine.finished[0].code == "asleep"
    assert engine.call(ReloadWeights()) is None and engine.core.stats().asleep is None
    engine.add(1)
    engine.run()
    engine.check_streams(1)


def test_weights_are_reloaded_under_running_requests_or_refused_or_lost(engine):
    engine.add(0, 1)
    engine.step(4)
    assert engine.call(ReloadWeights("/elsewhere")) == "/elsewhere has other shapes"
    assert engine.call(ReloadWeights("/there")) is None
    engine.step(2)
    assert "none now: the disk is gone" in str(engine.call(ReloadWeights("/broken")))
    engine.add(2)
    engine.step(3)
    assert engine.finished[2].code == "asleep" and "weights" not in engine.runner.awake
    assert engine.call(ReloadWeights()) is None
    engine.run()
    engine.check_streams(0, 1)
    assert engine.core.scheduler.totals.num_preemptions >= 4, "what was computed with other weights is computed again"


def test_a_method_of_the_runner_answers_and_raises_what_it_raises(engine):
    engine.runner.double = lambda value: 2 * value
    assert engine.executor.call("double", 21) == [42]
    with pytest.raises(OSError, match="the disk is gone"):
        engine.executor.call("reload_weights", "/broken")


def test_an_abort_during_a_pause_is_told(engine):
    engine.add(0)
    engine.step(2)
    engine.call(Pause("keep"))
    engine.core.handle(AbortRequests([0]))
    engine.step()
    assert 0 in engine.finished and engine.core.scheduler.num_running == 0
