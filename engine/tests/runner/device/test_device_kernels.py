"""Whole engines on Triton's kernels: interpreted on CPU tensors, and compiled on a GPU."""

import msgspec
import numpy as np
import pytest
import torch
from test_core_with_runner import SCHEDULER, requests
from test_device_runner import VOCAB, Engine

from penstock.engine.config import CacheConfig, EngineConfig, GraphConfig, SchedulerConfig
from penstock.engine.loading.checkpoint import read_model_config
from penstock.engine.messages import AddRequest
from penstock.engine.runner.device.device_runner import DeviceForms, DeviceRunner
from penstock.engine.sampling import SamplingParams
from penstock.kernels.ops import triton_ops
from penstock.kernels.sampling.ops import triton_sampling_ops
from penstock.kernels.step_state.ops import triton_step_ops

pytestmark = pytest.mark.slow


@pytest.mark.req("PERF-09")
def test_interpreted_kernels_give_the_tokens_of_a_cpu(checkpoint, build_runner, build_device_runner, interpreted):
    """A prompt in chunks beside decodes; a greedy and a filtered row; two steps in flight."""
    scheduler = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8)
    batch = []
    for index in range(2):
        tokens = np.random.default_rng(index).integers(0, VOCAB, 4 + 6 * index).tolist()
        sampling = SamplingParams(max_tokens=2, temperature=0.8 * index, top_k=20 * index, seed=index)
        batch.append(AddRequest(index, f"r{index}", tokens, sampling, float(index)))
    expected = Engine(build_runner(checkpoint("llama"), scheduler=scheduler, form="reference"), 1, 60).run(batch)
    forms = DeviceForms(triton_ops(torch.float32), triton_step_ops(), triton_sampling_ops())
    assert Engine(build_device_runner(checkpoint("llama"), scheduler=scheduler, forms=forms), 2, 60).run(batch) == expected


@pytest.mark.gpu
@pytest.mark.req("AS-06", "AS-08", "AS-17", "CG-15", "MR-12")
@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", ["llama-mha-linear-bias", "llama-7to1-llama3-tied", "gemma3"])
def test_a_gpu_gives_the_tokens_of_a_cpu_and_nothing_waits(checkpoint, build_runner, name, depth, mode):
    """In float32; a call that makes the host wait is an error but for the one event a step."""
    batch = requests(adjusted=False)
    expected = Engine(build_runner(checkpoint(name), scheduler=SCHEDULER), 1, 100).run(batch)
    config = EngineConfig(
        model=read_model_config(checkpoint(name), served_names=(), dtype="float32", max_model_len=320),
        cache=CacheConfig(block_size=16, num_blocks=100),
        scheduler=msgspec.structs.replace(SCHEDULER),
        device="cuda",
        depth=depth,
        graphs=GraphConfig(mode=mode, capture_sizes=(1, 2, 4, 8, 16, 48)),
    )
    runner = DeviceRunner(config)
    runner.load()
    runner.profile_memory()
    runner.initialize_kv_cache(100)
    found = Engine(runner, depth, 100)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert found.run(batch) == expected
    finally:
        torch.cuda.set_sync_debug_mode("default")
