"""Device runners over CPU tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from late_runtime import LateRuntime
from recording_graphs import RecordingGraphs

from penstock.engine.config import (
    CacheConfig,
    EngineConfig,
    GraphConfig,
    LogprobsMode,
    LoraConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from penstock.engine.loading.checkpoint import read_model_config
from penstock.engine.models.layers.linear_method import DeviceLinearMethod
from penstock.engine.quant.scheme import QuantizationName
from penstock.engine.runner import base
from penstock.engine.runner.device.device_runner import DeviceForms, DeviceRunner
from penstock.kernels.ops import device_reference_ops
from penstock.kernels.sampling import ops as sampling
from penstock.kernels.step_state.ops import STEP_REFERENCE

BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS = 16, 320, 320
FORMS = DeviceForms(device_reference_ops(), STEP_REFERENCE, sampling.REFERENCE)


@contextmanager
def device_weights() -> Iterator[None]:
    """Runners that are loaded within hold weights as on a device: in place and as they are, not in a CPU's own order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "linear_method", lambda *_, **__: DeviceLinearMethod)
        yield


def make_device_runner(
    path: Path,
    dtype: str = "float32",
    scheduler: SchedulerConfig | None = None,
    depth: int = 2,
    max_model_len: int = MAX_MODEL_LEN,
    lora: LoraConfig | None = None,
    forms: DeviceForms = FORMS,
    logprobs_mode: LogprobsMode = "raw_logprobs",
    recording: RecordingGraphs | None = None,
    graphs: GraphConfig | None = None,
    speculative: SpeculativeConfig | None = None,
    quantization: QuantizationName | None = None,
    kv_dtype: str = "auto",
) -> DeviceRunner:
    """A loaded runner with its cache, on torch's forms of a device's operations and a runtime whose copies come late."""
    options = {"dtype": dtype, "kv_dtype": kv_dtype, "max_model_len": max_model_len, "quantization": quantization}
    config = EngineConfig(
        model=read_model_config(path, served_names=(), **options),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        scheduler=scheduler or SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512),
        device="cuda",
        depth=depth,
        lora=lora,
        logprobs_mode=logprobs_mode,
        graphs=graphs or GraphConfig(),
        speculative=speculative,
    )
    recording = recording or RecordingGraphs()
    runner = DeviceRunner(config, LateRuntime(), DeviceForms(*map(recording.wrap, forms)), recording)
    with device_weights():
        runner.load()
    runner.initialize_kv_cache(NUM_BLOCKS)
    return runner
