"""Weights of few bits on a device: the same linear methods as on a CPU, whose packed weights a device's kernels read."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from device_runners import FORMS
from quantized_checkpoints import awq, fp8
from recording_graphs import RecordingGraphs
from test_core_with_runner import SCHEDULER, requests
from test_device_reload import GRAPHS, again, told
from test_device_runner import Engine

from penstock.engine.args import EngineArgs
from penstock.engine.commands import ReloadWeights
from penstock.engine.quant.online import QuantizedLinearMethod
from penstock.engine.runner.device.offload import storages_of
from penstock.kernels.float8_linear.reference import Float8Weight, float8_numbers, scaled_product
from penstock.kernels.ops import triton_ops
from penstock.kernels.quantized_linear.reference import QuantizedWeight

pytestmark = pytest.mark.slow

KERNELS = FORMS._replace(
    model=replace(
        FORMS.model,
        quantized_linear=triton_ops(torch.float32).quantized_linear,
        packed_experts=triton_ops(torch.float32).packed_experts,
    )
)
"""Triton's kernels for weights of few bits, and torch's for all else, which is quicker to interpret."""


def answers(runner, count: int = 3) -> dict[int, list[int]]:
    return Engine(runner, 1, 100).run(requests(adjusted=False)[:count])


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("llama", "int4_per_group_32"),
        ("llama", "fp8_per_block"),
        ("qwen3-moe", "int8_per_group_32"),
        ("qwen3-moe", "fp8_per_channel"),
    ],
)
def test_weights_quantized_while_loading_give_the_tokens_of_a_cpu(name, scheme, checkpoint, build_runner, build_device_runner):
    expected = answers(build_runner(checkpoint(name), scheduler=SCHEDULER, form="reference", quantization=scheme))
    runner = build_device_runner(checkpoint(name), scheduler=SCHEDULER, quantization=scheme)
    assert answers(runner) == expected
    assert isinstance(runner.model.layers[0].self_attn.o_proj._method, QuantizedLinearMethod)


def in_eight_bits(x, weight, rule, scale, bias):
    """As on a GPU, by torch's instructions of a CPU."""
    return scaled_product(*float8_numbers(x, rule, scale), weight, None, x.dtype) + (0 if bias is None else bias)


@pytest.mark.parametrize("scheme", ["fp8_per_tensor", "fp8_per_channel"])
def test_a_device_that_multiplies_eight_bits_is_given_them(scheme, checkpoint, build_runner, build_device_runner):
    """All layers of the model but experts' and routers'; a second load fills the same memory."""
    forms = FORMS._replace(model=replace(FORMS.model, float8_linear=in_eight_bits))
    for name in ("starcoder2", "qwen3-moe"):
        path = checkpoint(name)
        runner = build_device_runner(path, scheduler=SCHEDULER, quantization=scheme, forms=forms)
        layer = runner.model.layers[1]
        assert isinstance(layer.self_attn.o_proj._method.weight, Float8Weight)
        if name == "qwen3-moe":
            assert isinstance(layer.mlp.experts._down[0].weight, QuantizedWeight)
        expected = answers(build_runner(path, scheduler=SCHEDULER, form="reference", quantization=scheme))
        assert answers(runner) == expected
        before = layer.self_attn.o_proj._method.weight.values.data_ptr()
        runner.reload_weights(str(path))
        assert layer.self_attn.o_proj._method.weight.values.data_ptr() == before
        assert answers(runner) == expected


@pytest.mark.parametrize("pack", [partial(awq, group=16), fp8], ids=["awq", "fp8"])
def test_quantized_checkpoints_give_the_tokens_of_a_cpu(pack, checkpoint, build_runner, build_device_runner, tmp_path):
    pack(checkpoint("llama"), tmp_path / "packed")
    expected = answers(build_runner(tmp_path / "packed", scheduler=SCHEDULER, form="reference"))
    assert answers(build_device_runner(tmp_path / "packed", scheduler=SCHEDULER)) == expected


@pytest.mark.parametrize(("name", "scheme"), [("llama", "fp8_per_block"), ("qwen3-moe", "int4_per_group_32")])
def test_tritons_kernels_serve_the_model(name, scheme, checkpoint, build_device_runner, driver, interpreted):
    """Against torch's forms, which dequantize each weight."""
    found, expected = (build_device_runner(checkpoint(name), quantization=scheme, forms=forms) for forms in (KERNELS, FORMS))
    if name == "qwen3-moe":
        assert found.model.layers[1].mlp.experts.fused and not expected.model.layers[1].mlp.experts.fused
    tokens = [play.generate(play.admit([5, 9, 200]), 2) for play in (driver(found), driver(expected))]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("scheme", ["int4_per_group_32"])
def test_graphs_serve_other_weights_of_few_bits_at_the_same_addresses(scheme, checkpoint, build_runner, build_device_runner):
    """Room for the numbers in the files' order exists while they load, and no longer."""
    old, new = checkpoint("llama-7to1-llama3-tied"), checkpoint("llama-7to1-llama3-tied", "2GB")
    expected = {
        path: again(Engine(build_runner(path, scheduler=SCHEDULER, form="reference", quantization=scheme), 1, 100), 0)
        for path in (old, new)
    }
    assert expected[old] != expected[new]
    runner = build_device_runner(
        old, scheduler=SCHEDULER, recording=RecordingGraphs(), graphs=GRAPHS, quantization=scheme, max_model_len=320
    )
    found = Engine(runner, 2, 100)
    while runner.graphs.capture_next():
        pass
    assert again(found, 0) == expected[old]
    before = {storage.data_ptr(): storage.nbytes() for storage in storages_of(runner.model)}
    for first, path in ((100, new), (200, old)):
        assert told(found, ReloadWeights(str(path))) == [None]
        assert {storage.data_ptr(): storage.nbytes() for storage in storages_of(runner.model)} == before
        assert again(found, first) == expected[path]


def test_a_device_is_given_quantized_weights(checkpoint, tmp_path):
    """Both kinds pass the check of the arguments."""
    args = EngineArgs(model=str(checkpoint("llama")), quantization="int4_per_group_32")
    assert args.config("cuda").model.quantization == "int4_per_group_32"
    awq(checkpoint("llama"), tmp_path / "packed", group=16)
    assert EngineArgs(model=str(tmp_path / "packed")).config("cuda").model.stored_quantization is not None
