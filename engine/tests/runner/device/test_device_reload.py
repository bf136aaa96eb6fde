"""New weights for a device engine that serves: they come where the old ones were, so that every graph serves on."""

import msgspec
import pytest
from recording_graphs import RecordingGraphs
from test_core_with_runner import SCHEDULER, requests
from test_device_runner import Engine

from penstock.engine.commands import ReloadWeights, Resume, Sleep, WakeUp
from penstock.engine.config import GraphConfig
from penstock.engine.messages import Control
from penstock.engine.runner import base
from penstock.engine.runner.device.offload import storages_of

pytestmark = pytest.mark.slow

GRAPHS = GraphConfig(mode="FULL_AND_PIECEWISE", capture_sizes=(1, 2, 8, 48))


def told(found: Engine, *commands) -> list[str | None]:
    """Commands one after the other, each of which waits for the steps in flight; their errors."""
    replies = []
    for call, command in enumerate(commands):
        found.core.handle(Control(call, command))
        while len(replies) == call:
            found.step()
            replies += found.core.take_replies()
    return [reply.error for reply in replies]


def again(found: Engine, first: int) -> list[list[int]]:
    """The tokens of the same requests under other numbers."""
    batch = [msgspec.structs.replace(request, index=first + request.index) for request in requests(adjusted=False)]
    tokens = found.run(batch)
    return [tokens[request.index] for request in batch]


@pytest.fixture(scope="module")
def expected(checkpoint, build_runner):
    """By path, what a CPU gives."""
    paths = [checkpoint("llama-7to1-llama3-tied"), checkpoint("llama-7to1-llama3-tied", "2GB")]
    return {path: again(Engine(build_runner(path, scheduler=SCHEDULER, form="reference"), 1, 100), 0) for path in paths}


@pytest.fixture
def found(expected, build_device_runner):
    """An engine with the first weights, and all its graphs."""
    runner = build_device_runner(next(iter(expected)), scheduler=SCHEDULER, recording=RecordingGraphs(), graphs=GRAPHS)
    engine = Engine(runner, 2, 100)
    while runner.graphs.capture_next():
        pass
    return engine


def test_graphs_serve_other_weights_at_the_same_addresses(found, expected):
    runner, (old, new) = found.runner, expected
    captured, places = runner.graphs.report().captured, [storage.data_ptr() for storage in storages_of(runner.model)]
    assert again(found, 0) == expected[old]
    for first, path in ((100, new), (200, old)):
        assert told(found, ReloadWeights(str(path))) == [None]
        assert [storage.data_ptr() for storage in storages_of(runner.model)] == places
        assert (runner.graphs.report().captured, runner.graphs.report().pending) == (captured, 0)
        assert again(found, first) == expected[path] != expected[old if path is new else new]
    steps = {mode.mode: mode.steps for mode in found.core.stats().step.graphs}
    assert steps["FULL"] > 0 and steps["PIECEWISE"] > 0 and "NONE" not in steps


@pytest.mark.req("MEM-10")
def test_weights_come_anew_after_level_2_and_so_do_graphs(found, expected):
    old, new = expected
    assert again(found, 0) == expected[old]
    assert told(found, Sleep(2), WakeUp(), ReloadWeights(str(new)), Resume()) == [None] * 4
    assert found.runner.graphs.report().captured > 0
    assert again(found, 100) == expected[new]


def test_requests_go_on_through_a_reload_in_the_middle(found, expected):
    old, _ = expected
    for request in requests(adjusted=False):
        found.core.handle(request)
    for step in range(500):
        if step % 7 == 6:
            assert told(found, ReloadWeights()) == [None]
        found.step()
        if not found.core.has_work:
            break
    assert [found.tokens[index] for index in range(10)] == expected[old]


def test_what_is_refused_changes_nothing_and_what_breaks_can_be_mended(checkpoint, found, expected, monkeypatch):
    old, new = expected
    captured = found.runner.graphs.report().captured
    [error] = told(found, ReloadWeights(str(checkpoint("qwen3"))))
    assert "describes another model" in (error or "")
    assert found.runner.graphs.report().captured == captured
    assert again(found, 0) == expected[old]
    with monkeypatch.context() as patch:
        patch.setattr(base, "fill", lambda *_: 1 / 0)
        [error] = told(found, ReloadWeights(str(new)))
    assert "there are none now" in (error or "")
    assert told(found, ReloadWeights(str(new))) == [None]
    assert again(found, 100) == expected[new]


def test_a_start_with_more_tokens_a_step_than_its_rows_can_have_is_measured(checkpoint, build_device_runner):
    """As with the default of 2,048 and a single row of a short model."""
    scheduler = msgspec.structs.replace(SCHEDULER, max_num_seqs=2, max_num_batched_tokens=200)
    runner = build_device_runner(checkpoint("llama"), scheduler=scheduler, max_model_len=40)
    sizes: list[int] = []
    real = runner.execute
    runner.execute = lambda plan: (sizes.append(int(plan.num_new_tokens.sum())), real(plan))
    runner.profile_memory()
    assert sizes == [78]
