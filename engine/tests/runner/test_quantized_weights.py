"""Weights that are quantized while they are loaded, in a whole model."""

import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS, LLAMA, MAX_MODEL_LEN

from penstock.engine.args import EngineArgs
from penstock.engine.config import ConfigError, LoraConfig
from penstock.engine.models.build import Build
from penstock.engine.models.layers.linear import QKVParallelLinear, RowParallelLinear
from penstock.engine.models.layers.linear_method import UnquantizedLinearMethod
from penstock.engine.models.layers.shard import Shard
from penstock.engine.quant.online import SCHEMES, QuantizedLinearMethod, quantized
from penstock.engine.sampling import SamplingParams
from penstock.kernels.ops import REFERENCE
from penstock.kernels.quantized_linear.reference import bits, dequantized, quantize

VOCAB = 257
GREEDY = SamplingParams(max_tokens=100, temperature=0.0, logprobs=VOCAB)
LAYERS = re.compile(r"\.(q|k|v|o|gate|up|down)_proj\.weight$")


def prompt(length: int) -> list[int]:
    return np.random.default_rng(1).integers(0, VOCAB, length).tolist()


def played(play, chunk: int = 1000, outputs: int = 6) -> tuple[list[int], list[np.ndarray]]:
    """The tokens of one greedy request, and all log probabilities by token id."""
    sequence, tokens, logprobs = play.admit(prompt(70), GREEDY), list[int](), list[np.ndarray]()
    while len(tokens) < outputs:
        result = play.step([(sequence, min(chunk, len(sequence.tokens) - sequence.computed))])
        if result.counts[0]:
            tokens.append(int(result.token_ids[0, 0]))
            logprobs.append(result.logprobs.top_logprobs[0][np.argsort(result.logprobs.top_ids[0])])
    return tokens, logprobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with random weights, whose layers' inputs are multiples of 32."""
    transformers = pytest.importorskip("transformers")
    family, fields = CONFIGS["llama"]
    assert family == "Llama"
    torch.manual_seed(5)
    sizes = LLAMA | {"max_position_embeddings": MAX_MODEL_LEN} | fields | {"intermediate_size": 128}
    path = tmp_path_factory.mktemp("multiples")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, eos_token_id=None, bos_token_id=None)).save_pretrained(path)
    return path


@pytest.fixture(params=SCHEMES)
def scheme(request):
    return request.param


@pytest.mark.parametrize("form", ["best", "reference"])
def test_a_model_computes_with_the_quantized_numbers(scheme, form, folder, build_runner, driver, tmp_path):
    """Held to a checkpoint whose layers hold these numbers in float32."""
    source, (number, group, scale_dtype) = folder, SCHEMES[scheme]
    copy = tmp_path / "model"
    shutil.copytree(source, copy)
    tensors = load_file(source / "model.safetensors")
    for name in filter(LAYERS.search, tensors):
        values, scales = quantize(tensors[name], bits(number), group or tensors[name].shape[1], scale_dtype)
        tensors[name] = values * scales.float().repeat_interleave(group or tensors[name].shape[1], 1)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    tokens, logprobs = played(driver(build_runner(source, form=form, quantization=scheme)))
    expected_tokens, expected = played(driver(build_runner(copy, form=form)))
    assert tokens == expected_tokens
    np.testing.assert_allclose(logprobs, expected, atol=2e-4)
    assert not np.allclose(expected, played(driver(build_runner(source, form=form)))[1], atol=2e-4), "it is not the model itself"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_chunks_or_room_for_adapters(scheme, dtype, folder, build_runner, driver):
    runner = build_runner(folder, dtype, quantization=scheme)
    tokens, logprobs = played(driver(runner))
    with_lora = build_runner(folder, dtype, quantization=scheme, lora=LoraConfig())
    for play, chunk in ((driver(runner), 1), (driver(runner), 7), (driver(with_lora), 1000)):
        again, others = played(play, chunk)
        assert again == tokens and np.array_equal(others, logprobs), chunk


def layer(kind: str, scheme: str, shard: Shard, weights: dict[str, torch.Tensor]) -> QuantizedLinearMethod:
    method = quantized(UnquantizedLinearMethod, scheme, REFERENCE, 1)
    build = Build(REFERENCE, method, torch.float32, 64, shard, prefix="layers.3")
    if kind == "qkv":
        made = QKVParallelLinear(64, 4, 2, 16, False, build)
    else:
        made = RowParallelLinear("o_proj", shard.span(64, "inputs"), 40, False, build)
    for name, weight in made.weights().items():
        weight.load(weights[name])
    made.finish()
    assert isinstance(made._method, QuantizedLinearMethod)
    return made._method


def test_ranks_hold_the_numbers_of_one_process(scheme):
    torch.manual_seed(0)
    weights = {f"{name}.weight": torch.randn(64 if name == "q_proj" else 32, 64) for name in ("q_proj", "k_proj", "v_proj")}
    whole = dequantized(layer("qkv", scheme, Shard(), weights).weight)
    parts = [dequantized(layer("qkv", scheme, Shard(rank, 2), weights).weight) for rank in range(2)]
    parts = [torch.cat(part) for part in zip(*(part.split([32, 16, 16]) for part in parts), strict=True)]
    assert torch.equal(torch.cat(parts), whole)
    weights = {"o_proj.weight": torch.randn(40, 64)}
    whole = dequantized(layer("o", scheme, Shard(), weights).weight)
    assert torch.equal(
        torch.cat([dequantized(layer("o", scheme, Shard(rank, 2), weights).weight) for rank in range(2)], 1), whole
    )


def test_a_rank_that_would_cut_a_group_is_refused_by_layer():
    with pytest.raises(ConfigError, match=r"layers.3.o_proj has a rank of 16 inputs, no multiple of a group's 32$"):
        layer("o", "int4_per_group_32", Shard(0, 4), {})


def test_a_value_that_is_not_finite_is_found_by_layer_and_tensor(scheme):
    weights = {f"{name}.weight": torch.ones(64 if name == "q_proj" else 32, 64) for name in ("q_proj", "k_proj", "v_proj")}
    weights["k_proj.weight"][3, 40] = float("nan")
    with pytest.raises(ConfigError, match=r"layers.3.qkv_proj: k_proj.weight holds a value that is not finite"):
        layer("qkv", scheme, Shard(), weights)


def test_schemes_and_devices_that_do_not_exist_are_refused(folder):
    model = str(folder)
    with pytest.raises(ConfigError, match="quantization"):
        EngineArgs(model=model, quantization="int3").config("cpu")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="int4_per_group_32: quantized weights run on a CPU alone"):
        EngineArgs(model=model, quantization="int4_per_group_32").config("cuda")


def test_the_cost_of_a_step_counts_the_bytes_that_are_stored(folder):
    plain = EngineArgs(model=str(folder), dtype="bfloat16").config("cpu").model.cost
    small = EngineArgs(model=str(folder), dtype="bfloat16", quantization="int4_per_group_32").config("cpu").model.cost
    assert plain and small and small.layer_weight_bytes / plain.layer_weight_bytes == pytest.approx(0.28125)


def test_inputs_that_are_no_multiple_of_a_group_are_refused_by_layer(checkpoint, build_runner):
    with pytest.raises(ConfigError, match=r"layers.0.mlp.down_proj has 112 inputs, no multiple of a group's 32$"):
        build_runner(checkpoint("llama"), quantization="int4_per_group_32")


def test_experts_are_quantized_and_routers_are_not(checkpoint, build_runner, driver, tmp_path):
    """Held to a checkpoint whose layers hold these numbers in float32."""
    source, copy = checkpoint("mixtral"), tmp_path / "model"
    shutil.copytree(source, copy)
    tensors = load_file(source / "model.safetensors")
    for name in filter(re.compile(r"\.([qkvo]_proj|w[123])\.weight$").search, tensors):
        values, scales = quantize(tensors[name], 8, tensors[name].shape[1], torch.float32)
        tensors[name] = values * scales
    for name in filter(re.compile(r"\.experts\.(gate_up|down)_proj$").search, tensors):
        halves = [quantize(part, 8, part.shape[1], torch.float32) for part in tensors[name]]
        tensors[name] = torch.stack([values * scales for values, scales in halves])
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    tokens, logprobs = played(driver(build_runner(source, quantization="int8_per_channel_weight_only")))
    expected_tokens, expected = played(driver(build_runner(copy)))
    assert tokens == expected_tokens
    np.testing.assert_allclose(logprobs, expected, atol=2e-4)
    assert not np.allclose(expected, played(driver(build_runner(source)))[1], atol=2e-4), "it is not the model itself"
