"""CUDA's own graphs under the whole runner: `make gpu`."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from device_runners import BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS
from test_device_graphs import decodes
from test_device_runner import VOCAB, Engine

from penstock.engine.config import CacheConfig, EngineConfig, GraphConfig, SchedulerConfig
from penstock.engine.loading.checkpoint import read_model_config
from penstock.engine.runner.device.device_runner import DeviceRunner
from penstock.engine.runner.device.graphs import dispatcher as reasons
from penstock.engine.runner.device.graphs.capture import GraphManager
from penstock.engine.runner.device.graphs.sizes import default_capture_sizes

pytestmark = pytest.mark.gpu
SIZES = default_capture_sizes(256)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shape alone, for made-up weights: a GPU machine need not have what makes checkpoints."""
    folder = tmp_path_factory.mktemp("shape")
    shape = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 256}
    shape |= {"intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"max_position_embeddings": MAX_MODEL_LEN, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


@pytest.fixture(scope="module")
def make(path: Path) -> Any:
    def build(mode: str, sizes: tuple[int, ...] = SIZES, depth: int = 2) -> Engine:
        config = EngineConfig(
            model=read_model_config(path, served_names=(), dtype="float32", max_model_len=MAX_MODEL_LEN, load_format="dummy"),
            cache=CacheConfig(block_size=BLOCK_SIZE),
            scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256),
            device="cuda",
            depth=depth,
            graphs=GraphConfig(mode=mode, capture_sizes=sizes),
        )
        runner = DeviceRunner(config)
        runner.load()
        runner.profile_memory()
        runner.measure_memory()
        runner.initialize_kv_cache(NUM_BLOCKS)
        engine = Engine(runner, depth, NUM_BLOCKS)
        while runner.graphs.capture_next():
            pass
        return engine

    return build


def modes(engine: Engine) -> Counter:
    return Counter({(found.mode, found.reason): found.steps for found in engine.core.stats().step.graphs})


@pytest.mark.req("CG-06", "CG-11", "CG-14", "CG-15", "CG-18", "CG-33")
def test_every_batch_gets_the_tokens_of_eager_steps_across_block_borders(make) -> None:
    batch = decodes(32, range(3, 35), prompt=30)
    eager = make("NONE", sizes=()).run(batch)
    for mode, sizes in (("FULL_AND_PIECEWISE", SIZES), ("FULL", SIZES), ("PIECEWISE", SIZES), ("FULL_AND_PIECEWISE", (1, 2, 8))):
        engine = make(mode, sizes)
        captured = engine.runner.graphs.report().captured
        tokens = engine.run(batch)
        # Products of another number of rows differ in their last bits, so that two tokens nearly alike may change places.
        same = sum(tokens[index] == eager[index] for index in eager)
        assert same >= 0.9 * len(eager), (mode, sizes, same)
        assert engine.runner.graphs.report().captured == captured, "nothing is captured on a request's path"
        assert (modes(engine)["NONE", reasons.TOO_LARGE] > 0) == (sizes[-1] == 8)


@pytest.mark.req("CG-01", "IB-09", "MR-12")
def test_a_steady_decode_step_is_one_launch_without_an_allocation(make) -> None:
    engine = make("FULL_AND_PIECEWISE", depth=1)
    for request in decodes(3, range(200, 201), prompt=17):
        engine.core.handle(request)
    for _ in range(8):
        engine.step()
    before, steps = torch.cuda.memory_stats()["allocation.all.allocated"], 20
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        for _ in range(steps):
            engine.step()
    calls = Counter(event.key for event in profile.events() if event.key.startswith("cu"))
    assert calls["cudaGraphLaunch"] == steps
    assert calls["cudaLaunchKernel"] + calls["cuLaunchKernel"] + calls["cuLaunchKernelEx"] <= steps // 4, "blocks appended"
    assert calls["cudaStreamSynchronize"] + calls["cudaDeviceSynchronize"] <= 1, "the profiler's own"
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.req("CG-20", "CG-21", "CG-24", "CG-25")
def test_graphs_share_one_pool_cost_what_is_told_and_give_it_back(make) -> None:
    engine = make("FULL_AND_PIECEWISE")
    manager: GraphManager = engine.runner.graphs
    first = manager.report()
    assert first.pending == first.failed == 0
    assert first.seconds / first.captured < 1.0
    assert manager.max_bytes is not None and first.num_bytes <= manager.max_bytes
    manager.clear()
    engine.runner.capture_graph()
    while manager.capture_next():
        pass
    again = manager.report()
    assert again.captured == first.captured and again.num_bytes <= 1.2 * first.num_bytes + (4 << 20), "flat over captures"


@pytest.mark.req("CG-23")
def test_a_synchronisation_within_a_capture_is_an_error_and_the_engine_serves_on(make, caplog) -> None:
    engine = make("FULL_AND_PIECEWISE")
    manager: GraphManager = engine.runner.graphs
    expected = engine.run(decodes(2))
    manager.clear()
    manager.capture_next()
    step = engine.runner._capturable.step

    def waits(key):
        logits = step(key)
        logits.sum().item()
        return logits

    engine.runner._capturable.step = waits
    manager.capture_next()
    assert manager.report().failed == 1 and "could not be captured" in caplog.text
    engine.runner._capturable.step = step
    while manager.capture_next():
        pass
    assert engine.run(decodes(2)) == expected, "the graphs from before the failure and from after it"
