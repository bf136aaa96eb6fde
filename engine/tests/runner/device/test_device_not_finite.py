"""Where a device's numbers ceased to be finite is named as on a CPU, though further steps have been launched meanwhile."""

import pytest
import torch
from lora_adapters import make_adapter
from test_core_with_runner import SCHEDULER
from test_device_runner import Engine
from test_model_runner import PARTS

from penstock.engine.config import GraphConfig, LoraConfig, LoraModule
from penstock.engine.core.plan import SampleInputs
from penstock.engine.messages import AddRequest
from penstock.engine.runner import not_finite
from penstock.engine.runner.device.runtime import DeviceFailed
from penstock.engine.runner.not_finite import ELSEWHERE
from penstock.engine.sampling import SamplingParams

NAN = float("nan")


@pytest.mark.parametrize("part", PARTS)
def test_the_first_part_with_values_that_are_not_finite_is_named(checkpoint, build_device_runner, driver, part):
    runner = build_device_runner(checkpoint("qwen3"))
    play = driver(runner)
    PARTS[part](runner.model).fill_(NAN)
    result = play.step([(play.admit([1, 7, 2]), 3), (play.admit([1, 2, 3]), 3)])
    assert sorted(result.failed) == ([0] if part == "embed_tokens" else [0, 1])
    assert all(message.endswith(f"; the first values that are not: {part}") for message in result.failed.values())
    assert result.num_not_finite == len(result.failed)


def launched(runner, play, work):
    """A step whose result nobody has read yet; what it samples counts as known."""
    plan = play.plan(work)
    runner.execute(plan)
    for sequence, _ in work:
        sequence.tokens += [-1] * (sequence.computed == len(sequence.tokens))
    return runner.sample(SampleInputs(plan.step_id))


@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("name", ["llama", "qwen3-windows"])
def test_two_steps_in_flight_tell_of_a_broken_cache_once(checkpoint, build_device_runner, driver, name, mode):
    """The layer that reads it, though by then another step has used the same buffers."""
    sizes = () if mode == "NONE" else (1, 2)
    graphs = GraphConfig(mode=mode, capture_sizes=sizes)
    runner = build_device_runner(checkpoint(name), scheduler=SCHEDULER, graphs=graphs)
    while runner.graphs.capture_next():
        pass
    play = driver(runner, poison=False)
    other, sequence = play.admit(list(range(20))), play.admit(list(range(30, 50)))
    play.step([(other, 19), (sequence, 19)])
    layer = len(runner.kv_caches) - 1
    group = next(number for number, group in enumerate(runner.kv_layout().groups) if layer in group.layers)
    runner.kv_caches[layer][sequence.tables[group][0], 1, 0, 3] = NAN
    before = [cache.clone() for cache in runner.kv_caches]
    first, second = (launched(runner, play, [(other, 1), (sequence, 1)]) for _ in range(2))
    after = [cache.clone() for cache in runner.kv_caches]
    result = first.result()
    assert list(result.failed) == [1] and result.failed[1].endswith(f": layers.{layer}.self_attn")
    again = second.result()
    assert list(again.failed) == [1] and "first values" not in again.failed[1]
    assert (result.num_not_finite, again.num_not_finite) == (1, 0)
    for was, left, is_now in zip(before, after, runner.kv_caches, strict=True):
        assert left[1:].nan_to_num(9.0).equal(is_now[1:].nan_to_num(9.0)), "looking writes nothing"
        assert not was[1:].nan_to_num(9.0).equal(left[1:].nan_to_num(9.0)), "the steps did"
    # And the row's next tenant is told of anew.
    play.release(sequence)
    fresh = play.admit(list(range(30, 50)))
    play.step([(fresh, 19)])
    runner.kv_caches[layer][fresh.tables[group][0], 1, 0, 3] = NAN
    assert play.step([(fresh, 1)]).num_not_finite == 1


def test_blocks_that_are_somebody_elses_by_now_are_not_looked_at(checkpoint, build_device_runner, driver):
    runner = build_device_runner(checkpoint("llama"))
    play = driver(runner, poison=False)
    sequence, other = play.admit(list(range(20))), play.admit(list(range(20)))
    play.step([(sequence, 19), (other, 19)])
    runner.kv_caches[1][sequence.blocks[0], 1, 0, 3] = NAN
    first = launched(runner, play, [(sequence, 1)])
    play.release(sequence)
    launched(runner, play, [(other, 1)]).result()
    result = first.result()
    assert result.failed[0].endswith(f": {ELSEWHERE}") and result.num_not_finite == 1


class DeviceLost(Exception):
    """What the device says when it is gone."""


@pytest.mark.parametrize("error", [RuntimeError("shapes"), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_look_that_fails_ends_nobody(checkpoint, build_device_runner, driver, monkeypatch, caplog, error):
    runner, play, sequence = broken(checkpoint, build_device_runner, driver)
    stand_in(monkeypatch, runner, error)
    failed = launched(runner, play, [(sequence, 1)]).result().failed
    assert failed[0].endswith(f"; the first values that are not: not found: {type(error).__name__}")
    assert "could not be looked for" in caplog.text
    play.release(sequence)
    assert not play.step([(play.admit([1, 2, 3]), 3)]).failed


def test_a_device_that_fails_in_a_look_has_failed(checkpoint, build_device_runner, driver, monkeypatch):
    runner, play, sequence = broken(checkpoint, build_device_runner, driver)
    stand_in(monkeypatch, runner, DeviceLost())
    pending = launched(runner, play, [(sequence, 1)])
    with pytest.raises(DeviceFailed, match="lost"):
        pending.result()


def broken(checkpoint, build_device_runner, driver):
    """A request whose next step's numbers are not finite."""
    runner = build_device_runner(checkpoint("llama"))
    play = driver(runner, poison=False)
    sequence = play.admit(list(range(20)))
    play.step([(sequence, 19)])
    runner.kv_caches[1][sequence.blocks[0], 1, 0, 3] = NAN
    return runner, play, sequence


def stand_in(monkeypatch, runner, error):
    """Looks raise `error`; as a GPU's, the runtime calls lack of memory a failure, too."""

    def look(*_):
        raise error

    def failure(error):
        return DeviceFailed("lost") if isinstance(error, DeviceLost | torch.OutOfMemoryError) else None

    monkeypatch.setattr(not_finite, "name_first_part", look)
    monkeypatch.setattr(type(runner.runtime), "failure", staticmethod(failure))


def test_warm_up_names_the_part_too(checkpoint, build_device_runner):
    runner = build_device_runner(checkpoint("llama"))
    runner.model.layers[1]._norms[0].weight.fill_(NAN)
    with pytest.raises(RuntimeError, match=r"first values that are not: layers\.1\.self_attn\.qkv_proj; are the checkpoint"):
        runner.warm_up()


def test_the_request_is_run_again_with_its_adapter(checkpoint, build_device_runner, tmp_path):
    """Whose values are finite, and whose product is not."""
    path = checkpoint("llama")
    model = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(path)
    make_adapter(tmp_path, model, modules=("o_proj",), scale=1e25)
    runner = build_device_runner(path, lora=LoraConfig(max_loras=1, max_cpu_loras=1, max_lora_rank=8))
    engine = Engine(runner, 2, 100)
    engine.core.load_adapters([LoraModule("huge", str(tmp_path))])
    [adapter] = engine.core.adapters()
    sampling = SamplingParams(max_tokens=3, temperature=0.0)
    engine.run([AddRequest(index, str(index), [1, 2, 3], sampling, 0.0, lora_id=adapter.lora_id * index) for index in (0, 1)])
    assert engine.finished[0].error is None and len(engine.tokens[0]) == 3
    assert (engine.finished[1].error or "").endswith("; the first values that are not: layers.0")
