"""A KV cache of eight bits on a device: the runner's own way to it, with torch's forms and with Triton's."""

from dataclasses import replace

import pytest
import torch
from device_runners import FORMS
from test_attention_choice import play
from test_core_with_runner import SCHEDULER, requests
from test_device_reload import GRAPHS
from test_device_runner import Engine
from test_kv_scales import FACTOR, with_one_large_head
from triton.runtime.interpreter import InterpretedFunction

from penstock.engine.args import EngineArgs
from penstock.engine.config import ConfigError
from penstock.engine.runner.device.warm import MetaRunner
from penstock.kernels.ops import triton_ops

KV_DTYPES = ["fp8_e4m3", "fp8_e5m2", "int8_per_token_head"]
TRITON = triton_ops(torch.float32)
KERNELS = FORMS._replace(
    model=replace(FORMS.model, prepare_kv=TRITON.prepare_kv, paged_attention=TRITON.paged_attention, form="interpreted")
)
"""Triton's kernels for the cache, and torch's for all else, which is quicker to interpret."""


@pytest.fixture(scope="module")
def scaled(checkpoint, tmp_path_factory):
    """A model whose second KV head has keys and values that are 2,048 times as large, and scales that say so."""
    own = [[[1.0]], [[FACTOR]]]
    return with_one_large_head(checkpoint("llama"), tmp_path_factory.mktemp("scaled"), ("k_scale", own), ("v_scale", own))


@pytest.mark.req("Q-17", "Q-18", "Q-21")
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_device_gives_the_tokens_of_a_cpu(scaled, kv_dtype, build_runner, build_device_runner, driver, interpreted):
    """In chunks, and decodes beside prompts."""
    expected = play(driver, build_runner(scaled, kv_dtype=kv_dtype))
    for forms in (FORMS, KERNELS)[: 1 if kv_dtype == "fp8_e5m2" else 2]:
        runner = build_device_runner(scaled, forms=forms, kv_dtype=kv_dtype)
        assert {cache.itemsize for cache in runner.kv_caches} == {1}
        assert play(driver, runner) == expected, forms.model.form


def test_graphs_serve_other_scales_at_the_same_addresses(scaled, checkpoint, build_runner, build_device_runner):
    """Those of a checkpoint that comes later, and 1.0 where it has none."""
    options = {"scheduler": SCHEDULER, "kv_dtype": "fp8_e4m3"}
    wanted, folders = requests(adjusted=False)[:2], (scaled, checkpoint("llama", "2GB"))
    expected = [Engine(build_runner(folder, form="reference", **options), 1, 100).run(wanted) for folder in folders]
    runner = build_device_runner(scaled, graphs=GRAPHS, **options)
    while runner.graphs.capture_next():
        pass
    assert runner.program.kv_scales.tolist() == [[[1.0, FACTOR]] * 2] * 2
    assert Engine(runner, 2, 100).run(wanted) == expected[0]
    runner.reload_weights(str(folders[1]))
    assert (runner.program.kv_scales == 1.0).all()
    assert Engine(runner, 2, 100).run(wanted) == expected[1]


@pytest.mark.parametrize("kv_dtype", ["auto", *KV_DTYPES])
def test_what_is_compiled_ahead_is_of_the_caches_dtype(checkpoint, kv_dtype, monkeypatch):
    """With scales where keys and values are divided by such, also where a checkpoint has none: another variant would be compiled
    in the middle of a request."""
    given = {}

    class Recorder:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, grid):
            return lambda *arguments, **_: given.__setitem__(self._name, [x for x in arguments if isinstance(x, torch.Tensor)])

    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda self, grid: Recorder(self.fn.__name__)[grid])
    args = {"model": str(checkpoint("llama")), "load_format": "dummy", "max_num_seqs": 4, "max_num_batched_tokens": 16}
    runner = MetaRunner(EngineArgs(**args, kv_cache_dtype=kv_dtype).config("cuda"), "sm_90")
    runner.load()
    runner.initialize_kv_cache(1)
    runner.warm_up()
    for kernel in ("_prepare_kv_kernel", "_paged_attention_kernel"):
        assert any(x.dtype is runner.kv_caches[0].dtype for x in given[kernel])
        assert any(x.shape == (2, 2) for x in given[kernel]) is kv_dtype.startswith("fp8")


def test_a_gpu_without_the_format_is_refused_ahead(checkpoint):
    args = {"model": str(checkpoint("llama")), "load_format": "dummy", "kv_cache_dtype": "fp8"}
    with pytest.raises(ConfigError, match=r"compute capability 8.0 is below 8.9, for a KV cache of torch.float8_e4m3fn"):
        MetaRunner(EngineArgs(**args).config("cuda"), "sm_80").load()
