"""Which adapters there are is in every report, and told at once when it changes: gateways hold requests for it."""

import time
from types import SimpleNamespace

import pytest
from fake_runner import FakeRunner
from harness import make_config

from penstock.api.events import Event
from penstock.api.load_report import LoadReport
from penstock.engine.commands import LoadAdapter, SyncAdapters, UnloadAdapter
from penstock.engine.core.core import EngineCore
from penstock.engine.core.executor import InlineExecutor
from penstock.engine.core.ipc.process import CoreLoop
from penstock.engine.messages import AdaptersChanged, Control, ControlDone, CoreOutput
from penstock.engine.stats import CoreStats


@pytest.fixture
def said() -> list[CoreOutput | Event]:
    """What the core says to its frontends and to the event stream, in order."""
    return []


@pytest.fixture
def core() -> EngineCore:
    config = make_config(loras=(2, 4))
    runner = FakeRunner(config)
    runner.initialize_kv_cache(64)
    return EngineCore(config, InlineExecutor(runner), 64, epoch=1)


@pytest.fixture
def loop(core: EngineCore, said: list[CoreOutput | Event]) -> CoreLoop:
    port = SimpleNamespace(poll=lambda _patience_ms: False, send=said.append, watch=lambda _descriptor: None)
    socket = SimpleNamespace(fileno=lambda: 0)
    publisher = SimpleNamespace(replay_socket=socket, publish=lambda batch, _time: said.extend(batch))
    made = CoreLoop(core, port, publisher, 60.0)
    made.turn()
    assert [it.adapters for it in said if isinstance(it, LoadReport)] == [()]
    said.clear()
    return made


def test_a_changed_set_is_told_to_frontends_and_then_to_everybody_at_once(
    core: EngineCore, loop: CoreLoop, said: list[CoreOutput | Event]
) -> None:
    for command, names in ((LoadAdapter("sql", "/sql"), ("sql",)), (UnloadAdapter("sql"), ())):
        loop._last_report = time.monotonic() + 1e6  # no report is due
        core.handle(Control(1, command))
        while not any(isinstance(it, ControlDone) for it in said):
            loop.turn()
        kinds = [type(it) for it in said]
        assert kinds == [AdaptersChanged, CoreStats, ControlDone, CoreStats, LoadReport]
        (told,) = (it for it in said if isinstance(it, LoadReport))
        assert told.adapters == names
        said.clear()
    loop._last_report = time.monotonic() + 1e6
    loop.turn()
    assert said == []


def test_who_asks_what_was_said_has_heard_it_before_the_answer(
    core: EngineCore, loop: CoreLoop, said: list[CoreOutput | Event]
) -> None:
    core.handle(Control(1, LoadAdapter("sql", "/sql")))
    core.handle(Control(2, SyncAdapters()))
    core.handle(Control(3, UnloadAdapter("none")))
    while [it.call_id for it in said if isinstance(it, ControlDone)] != [2, 3, 1]:
        loop.turn()
    said.clear()
    core.handle(Control(4, UnloadAdapter("sql")))
    core.handle(Control(5, SyncAdapters()))
    loop.turn()
    told = [it for it in said if isinstance(it, AdaptersChanged | ControlDone)]
    assert told == [AdaptersChanged([]), ControlDone(4, None, None), ControlDone(5, None, None)]


def test_an_engine_that_serves_no_adapters_says_so() -> None:
    config = make_config()
    core = EngineCore(config, InlineExecutor(FakeRunner(config)), 64, epoch=1)
    assert core.stats().report.adapters == ()
