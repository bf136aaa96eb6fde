"""A profile names the parts of every step, and leaves nothing behind."""

import gc
import gzip
import json
import weakref
from pathlib import Path

import msgspec
import pytest

from penstock.engine.commands import Command, StartProfile, StopProfile
from penstock.engine.core.core import EngineCore
from penstock.engine.core.executor import executor_of
from penstock.engine.messages import AddRequest, Control, ControlDone
from penstock.engine.sampling import SamplingParams


def call(core: EngineCore, command: Command) -> ControlDone:
    core.handle(Control(1, command))
    while not (replies := core.take_replies()):
        core.step()
    return replies[0]


def answer(core: EngineCore, index: int, tokens: int = 4) -> None:
    core.handle(AddRequest(index, "r", [1, 2, 3], SamplingParams(max_tokens=tokens, temperature=0.0), 0.0))
    while core.has_work:
        core.step()


@pytest.mark.parametrize("depth", [1, 2])
def test_the_parts_of_every_step_are_in_the_trace_by_name(checkpoint, build_runner, tmp_path: Path, depth: int):
    runner = build_runner(checkpoint("llama"))
    runner.warm_up()
    model, layers, before = runner.model, list(runner.model.layers), dict(vars(runner))
    config = msgspec.structs.replace(runner.config, depth=depth, profile_dir=tmp_path / "made" / "here")
    executor = executor_of(config, runner)
    core = EngineCore(config, executor, 30, epoch=1)
    try:
        assert call(core, StartProfile()).error is None
        assert call(core, StartProfile()).error == "a profile is being made already"
        answer(core, 0)
        done = call(core, StopProfile())
        assert done.error is None
        answer(core, 1)
    finally:
        executor.close()
    path = Path(done.result["path"])
    assert path.parent == tmp_path / "made" / "here"
    events = [event for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if event.get("ph") == "X"]
    counts = {
        name: sum(event["name"] == name for event in events) for name in ("execute", "sample", "update", "lm_head", "layer 0")
    }
    assert counts == dict.fromkeys(counts, 4), "four steps, and none of those after the end"
    for name in ("attention", "mlp", "attend", "prepare_kv"):
        assert sum(event["name"] == name for event in events) == 4 * len(layers)
    assert any(event["name"] == "schedule" for event in events)
    assert any(event["name"].startswith("aten::") for event in events)
    assert model.layers == layers and {"execute", "sample"}.isdisjoint(vars(runner)) and vars(runner)["ops"] is before["ops"]
    assert {"schedule", "update"}.isdisjoint(vars(core.scheduler))


def test_a_profile_without_a_folder_or_a_start_is_refused(checkpoint, build_runner):
    runner = build_runner(checkpoint("llama"))
    core = EngineCore(runner.config, executor_of(runner.config, runner), 30, epoch=1)
    assert call(core, StartProfile()).error == "the engine was started without --profile-dir"
    assert call(core, StopProfile()).error == "no profile is being made"


def test_a_profile_that_cannot_be_written_leaves_no_part_of_it(checkpoint, build_runner, tmp_path, monkeypatch):
    def export(_self: object, path: str) -> None:
        Path(path).write_bytes(b"a beginning")
        raise OSError("no space left")

    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", export)
    runner = build_runner(checkpoint("llama"))
    runner.start_profile()
    with pytest.raises(OSError, match="no space"):
        runner.stop_profile(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_profile_that_is_written_keeps_no_memory(checkpoint, build_runner, tmp_path):
    runner = build_runner(checkpoint("llama"))
    runner.start_profile()
    trace = weakref.ref(runner._profile._profile)
    runner.warm_up()
    gc.disable()  # in the core it may be long until one comes
    try:
        runner.stop_profile(tmp_path)
    finally:
        gc.enable()
    assert trace() is None
