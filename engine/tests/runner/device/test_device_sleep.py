"""A device runner sleeps, wakes and takes other weights, and answers as before."""

from dataclasses import replace

import pytest
import torch
from device_runners import FORMS
from late_runtime import LateRuntime
from lora_adapters import make_adapter
from test_core_with_runner import SCHEDULER, requests
from test_device_runner import Engine
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.engine.commands import ReloadWeights, Resume, Sleep, WakeUp
from penstock.engine.config import GraphConfig, LoraConfig, LoraModule
from penstock.engine.messages import Control
from penstock.engine.runner.device.offload import HostCopy, storages_of
from penstock.kernels.ops import triton_ops

pytestmark = pytest.mark.slow

PROMPT = [5, 9, 200, 31, 77, 8, 3] * 9


def answer(driver, runner) -> list[int]:
    play = driver(runner)
    return list(play.generate(play.admit(PROMPT), 10, chunk=40))


def device_bytes(runner) -> int:
    return sum(storage.nbytes() for storage in storages_of(runner.model))


@pytest.mark.req("MEM-06", "MEM-09")
def test_weights_go_to_the_host_at_level_1_and_come_back_by_their_tag(checkpoint, build_device_runner, driver):
    runner = build_device_runner(checkpoint("qwen3"))
    expected, awake = answer(driver, runner), device_bytes(runner)
    tensors = list(storages_of(runner.model))
    runner.sleep(1)
    assert sum(storage.nbytes() for storage in tensors) == 0 < awake and not runner.kv_caches
    runner.wake_up(["weights"])
    assert device_bytes(runner) == awake and not runner.kv_caches
    runner.wake_up(["kv_cache"])
    assert answer(driver, runner) == expected


@pytest.mark.parametrize("scheme", [None, "int4_per_group_32"])
def test_kernels_find_experts_where_they_lie_after_sleep(scheme, checkpoint, build_device_runner):
    ops = triton_ops(torch.float32)
    forms = FORMS._replace(model=replace(FORMS.model, experts=ops.experts, packed_experts=ops.packed_experts))
    runner = build_device_runner(checkpoint("qwen3-moe"), forms=forms, quantization=scheme)
    table = runner.model.layers[1].mlp.experts._table

    def known() -> list[list[int]]:
        return [(at if at.dim() == 1 else at[:, 0]).tolist() for at in (table.gate_up_at, table.down_at)]

    def there() -> list[list[int]]:
        weights = ([layer if scheme is None else layer.weight.values for layer in each] for each in (table.gate_up, table.down))
        return [[weight.data_ptr() for weight in each] for each in weights]

    before = known()
    runner.sleep(1)
    taken = [torch.empty(size, dtype=torch.uint8) for size in range(1_000, 40_000, 100)]
    runner.wake_up(["weights"])
    assert before != known() == there() and taken


@pytest.mark.req("MEM-07")
def test_level_2_drops_them_also_after_level_1(checkpoint, build_device_runner, driver):
    runner = build_device_runner(checkpoint("qwen3"))
    expected = answer(driver, runner)
    runner.sleep(1)
    runner.sleep(2)
    assert not hasattr(runner, "model")
    runner.wake_up(["weights", "kv_cache"])
    runner.reload_weights(None)
    assert answer(driver, runner) == expected


def test_the_host_keeps_nothing_of_a_model_that_is_awake(checkpoint, build_device_runner, driver, monkeypatch):
    copies: list[HostCopy] = []
    original = HostCopy.__init__

    def kept(self, *args):
        original(self, *args)
        copies.append(self)

    monkeypatch.setattr(HostCopy, "__init__", kept)
    runner = build_device_runner(checkpoint("qwen3"))
    assert isinstance(runner.runtime, LateRuntime)
    runner.sleep(1)
    runner.sleep(1)
    assert len(copies) == 1, "who sleeps already has nothing left to move"
    runner.wake_up(["weights", "kv_cache"])
    assert not copies[0]._slabs


@pytest.mark.req("MEM-06", "MEM-07")
@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("level", [1, 2])
def test_nobody_keeps_what_sleep_gives_back(checkpoint, build_device_runner, tmp_path, mode, level):
    """Of an engine that has served with adapters and graphs: not the last step, nor who reads adapters."""
    path, graphs = checkpoint("llama"), GraphConfig(mode=mode, capture_sizes=(1, 2, 8) if mode != "NONE" else ())
    model = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(path)
    make_adapter(tmp_path, model)
    lora = LoraConfig(max_loras=1, max_cpu_loras=1, max_lora_rank=8)
    runner = build_device_runner(path, scheduler=SCHEDULER, lora=lora, graphs=graphs)
    engine = Engine(runner, 2, 100)
    engine.core.load_adapters([LoraModule("a", str(tmp_path))])
    expected = dict(engine.run(requests(adjusted=False)))
    cache = [StorageWeakRef(runner.kv_caches[0].untyped_storage())]
    buffer = runner.buffers.inputs.token_slots.data_ptr()  # adapters read it, and it is the runner's
    weights = [StorageWeakRef(storage) for storage in storages_of(runner.model) if storage.data_ptr() != buffer]
    for call, command in enumerate((Sleep(level), WakeUp(("kv_cache",)))):
        engine.core.handle(Control(call, command))
        engine.step()
        assert all(ref.expired() for ref in cache)
        assert {ref.expired() for ref in weights} == {level == 2}
    for call, command in enumerate((WakeUp(), *[ReloadWeights()] * (level == 2), Resume())):
        engine.core.handle(Control(call, command))
        engine.step()
    assert [reply.error for reply in engine.core.take_replies()] == [None] * (4 + (level == 2))
    engine.tokens.clear()
    assert engine.run(requests(adjusted=False)) == expected
