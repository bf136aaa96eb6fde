"""Adapters on a device runner: requests get the tokens that a CPU gives them, each with its adapter, in one batch."""

import msgspec
import numpy as np
import pytest
from lora_adapters import make_adapter
from test_device_runner import VOCAB, Engine

from penstock.engine.config import LoraConfig, LoraModule, SchedulerConfig
from penstock.engine.messages import AddRequest
from penstock.engine.sampling import SamplingParams
from penstock.kernels.lora.device import DeviceLoraShelf

SCHEDULER = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=48, watermark=0.0)


def run(runner, depth: int, modules: list[LoraModule]) -> dict[int, list[int]]:
    found = Engine(runner, depth, 100)
    found.core.load_adapters(modules)
    ids = {info.name: info.lora_id for info in found.core.adapters()}
    batch = []
    for index in range(9):
        tokens = np.random.default_rng(index // 3).integers(0, VOCAB, 10 + 7 * index).tolist()
        name = [None, "a", "b"][index % 3]
        sampling = SamplingParams(max_tokens=10, temperature=0.0)
        request = AddRequest(index, f"r{index}", tokens, sampling, float(index))
        batch.append(request if name is None else msgspec.structs.replace(request, lora_id=ids[name]))
    tokens = found.run(batch)
    assert all(ended.error is None for ended in found.finished.values())
    return tokens


@pytest.mark.slow
@pytest.mark.req("LO-01", "LO-03")
@pytest.mark.parametrize("max_loras", [1, 2])
def test_each_request_gets_its_adapters_tokens(checkpoint, build_runner, build_device_runner, tmp_path, max_loras):
    path, lora = checkpoint("llama"), LoraConfig(max_loras=max_loras, max_cpu_loras=4, max_lora_rank=16)
    model = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(path)
    modules = []
    for seed, name in enumerate("ab"):
        make_adapter(tmp_path / name, model, seed=seed)
        modules.append(LoraModule(name, str(tmp_path / name)))
    expected = run(build_runner(path, scheduler=SCHEDULER, lora=lora, form="reference"), 1, modules)
    assert len({tuple(tokens) for tokens in expected.values()}) == 9
    for depth in (1, 2):
        assert run(build_device_runner(path, scheduler=SCHEDULER, lora=lora, depth=depth), depth, modules) == expected


def test_slots_are_filled_from_pinned_memory_in_the_dtype_of_the_model(checkpoint, build_device_runner, tmp_path, monkeypatch):
    """From anything else a GPU's driver copies while the host waits, for the steps in flight too."""
    path, lora = checkpoint("llama"), LoraConfig(max_loras=1, max_cpu_loras=2, max_lora_rank=16)
    model = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained(path)
    modules = [LoraModule(name, str(make_adapter(tmp_path / name, model, seed=seed))) for seed, name in enumerate("ab")]
    runner = build_device_runner(path, dtype="bfloat16", scheduler=SCHEDULER, lora=lora)
    pinned: set[int] = set()
    give, put = runner._lora._pinned, DeviceLoraShelf.put
    puts = []

    def noted(*shape, dtype):
        memory = give(*shape, dtype=dtype)
        pinned.add(memory.untyped_storage().data_ptr())
        return memory

    def watched(shelf, slot, a, b):
        puts.append([(value.untyped_storage().data_ptr() in pinned, value.dtype is shelf.a.dtype) for value in (a, b)])
        put(shelf, slot, a, b)

    monkeypatch.setattr(runner._lora, "_pinned", noted)
    monkeypatch.setattr(DeviceLoraShelf, "put", watched)
    run(runner, 2, modules)
    assert len(puts) >= 2 * 7 * 2 and all(found == [(True, True)] * 2 for found in puts)
