"""Weights that are quantized while they are loaded, in a whole model."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from quantized_checkpoints import LAYERS as NAMES
from quantized_checkpoints import fp8, one_by_one, rewritten
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
from penstock.kernels.quantized_linear.reference import dequantized, quantize

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
    """A checkpoint with random weights, whose layers' inputs are multiples of 32; of blocks of 128 the last is smaller."""
    transformers = pytest.importorskip("transformers")
    family, fields = CONFIGS["llama"]
    assert family == "Llama"
    torch.manual_seed(5)
    sizes = LLAMA | {"max_position_embeddings": MAX_MODEL_LEN} | fields | {"intermediate_size": 352}
    path = tmp_path_factory.mktemp("multiples")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, eos_token_id=None, bos_token_id=None)).save_pretrained(path)
    return path


@pytest.fixture(params=SCHEMES)
def scheme(request):
    return request.param


def stands_for(weight: torch.Tensor, scheme: str) -> torch.Tensor:
    """The numbers that a weight becomes, times their scales."""
    number, group, scale_dtype, outputs, _ = SCHEMES[scheme]
    group = group or weight.shape[1]
    values, scales = quantize(weight, number, group, scale_dtype, outputs)
    wide = values.view(torch.float8_e4m3fn).float() if number == "e4m3" else values.float()
    return wide * scales.float().repeat_interleave(group, 1)[:, : weight.shape[1]]


def widened(source: Path, target: Path, scheme: str) -> Path:
    """A copy whose layers hold those numbers in float32."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    tensors |= {name: stands_for(tensors[name], scheme) for name in filter(LAYERS.search, tensors)}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def without_rounding(runner):
    """The runner, whose layers take their inputs as they are."""
    for layer in runner.model.layers:
        for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
            linear._method._rounding = None
    return runner


@pytest.mark.parametrize("form", ["best", "reference"])
def test_a_model_computes_with_the_quantized_numbers(scheme, form, folder, build_runner, driver, tmp_path):
    """Held to a checkpoint whose layers hold these numbers in float32."""
    copy = widened(folder, tmp_path / "model", scheme)
    tokens, logprobs = played(driver(without_rounding(build_runner(folder, form=form, quantization=scheme))))
    expected_tokens, expected = played(driver(build_runner(copy, form=form)))
    assert tokens == expected_tokens
    np.testing.assert_allclose(logprobs, expected, atol=2e-4)
    assert not np.allclose(expected, played(driver(build_runner(folder, form=form)))[1], atol=2e-4), "it is not the model itself"


def by_channel(source: Path, target: Path) -> Path:
    """An FP8 checkpoint of compressed-tensors with a scale for each output, and inputs that are rounded by token."""

    def pack(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        scales = weight.abs().amax(1, keepdim=True) / 448
        values = (weight / scales).to(torch.float8_e4m3fn)
        return {"weight": values, "weight_scale": scales}, values.float() * scales

    number = {"num_bits": 8, "type": "float", "symmetric": True}
    inputs = number | {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": number | {"strategy": "channel"}, "input_activations": inputs}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    return rewritten(source, target, config | {"ignore": ["lm_head"]}, pack)


OFFLINE = {
    "fp8_per_tensor": lambda source, target: fp8(source, target, block=None),
    "fp8_per_channel": by_channel,
    "fp8_per_block": fp8,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OFFLINE)
def test_fp8_while_loading_has_the_bits_of_an_fp8_checkpoint(name, dtype, folder, build_runner, driver, tmp_path):
    OFFLINE[name](folder, tmp_path / "offline")
    tokens, logprobs = played(driver(build_runner(folder, dtype, quantization=name)))
    expected_tokens, expected = played(driver(build_runner(tmp_path / "offline", dtype)))
    assert tokens == expected_tokens and np.array_equal(logprobs, expected)
    plain = without_rounding(build_runner(folder, dtype, quantization=name))
    assert not np.array_equal(played(driver(plain))[1], logprobs), "inputs are rounded too"


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
        made = RowParallelLinear("o_proj", shard.span(256, "inputs"), 40, False, build)
    for name, weight in made.weights().items():
        weight.load(weights[name])
    made.finish()
    assert isinstance(made._method, QuantizedLinearMethod)
    return made._method


def test_ranks_hold_the_numbers_of_one_process(scheme):
    torch.manual_seed(0)
    weights = {f"{name}.weight": torch.randn(64 if name == "q_proj" else 32, 64) for name in ("q_proj", "k_proj", "v_proj")}
    weights["q_proj.weight"][60, 3], weights["k_proj.weight"][2, 5] = (
        40.0,
        -60.0,
    )  # the first rank's and the second's maxima differ
    whole = dequantized(layer("qkv", scheme, Shard(), weights).weight)
    parts = [dequantized(layer("qkv", scheme, Shard(rank, 2), weights).weight) for rank in range(2)]
    parts = [torch.cat(part) for part in zip(*(part.split([32, 16, 16]) for part in parts), strict=True)]
    assert torch.equal(torch.cat(parts), whole)
    weights = {"o_proj.weight": torch.randn(40, 256)}
    weights["o_proj.weight"][7, 200] = 50.0
    whole = dequantized(layer("o", scheme, Shard(), weights).weight)
    assert torch.equal(
        torch.cat([dequantized(layer("o", scheme, Shard(rank, 2), weights).weight) for rank in range(2)], 1), whole
    )


@pytest.mark.parametrize(("scheme", "ranks", "group"), [("int4_per_group_32", 16, 32), ("fp8_per_block", 4, 128)])
@pytest.mark.parametrize("rank", ["first", "last"])
def test_a_rank_that_would_cut_a_group_is_refused_by_layer(scheme, ranks, group, rank):
    size = 256 // ranks
    what = f"ends at input {size}" if rank == "first" else f"begins at input {256 - size}"
    with pytest.raises(ConfigError, match=rf"a rank's part of layers.3.o_proj {what} of 256, no multiple of a group's {group}$"):
        layer("o", scheme, Shard(0 if rank == "first" else ranks - 1, ranks), {})


def test_a_value_that_is_not_finite_is_found_by_layer_and_tensor(scheme):
    weights = {f"{name}.weight": torch.ones(64 if name == "q_proj" else 32, 64) for name in ("q_proj", "k_proj", "v_proj")}
    for value in (float("nan"), float("inf"), float("-inf")):
        weights["k_proj.weight"][3, 40] = value
        with pytest.raises(ConfigError, match=r"layers.3.qkv_proj: k_proj.weight holds a value that is not finite"):
            layer("qkv", scheme, Shard(), weights)


def test_schemes_that_do_not_exist_are_refused(folder):
    with pytest.raises(ConfigError, match="quantization"):
        EngineArgs(model=str(folder), quantization="int3").config("cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scheme", "share"),
    [("int4_per_group_32", 0.28125), ("fp8_per_tensor", 0.5), ("fp8_per_channel", 0.5), ("fp8_per_block", 0.515625)],
)
def test_the_cost_of_a_step_counts_the_bytes_that_are_stored(scheme, share, folder):
    plain = EngineArgs(model=str(folder), dtype="bfloat16").config("cpu").model.cost
    small = EngineArgs(model=str(folder), dtype="bfloat16", quantization=scheme).config("cpu").model.cost
    assert plain and small and small.layer_weight_bytes / plain.layer_weight_bytes == pytest.approx(share)


def test_the_last_group_of_inputs_may_be_shorter(checkpoint, build_runner, driver, tmp_path):
    source = checkpoint("llama")
    assert load_file(source / "model.safetensors")["model.layers.0.mlp.down_proj.weight"].shape[1] == 112
    tokens, logprobs = played(driver(build_runner(source, quantization="int4_per_group_32")))
    expected_tokens, expected = played(driver(build_runner(widened(source, tmp_path / "model", "int4_per_group_32"))))
    assert tokens == expected_tokens
    np.testing.assert_allclose(logprobs, expected, atol=2e-4)


def test_experts_are_quantized_and_routers_are_not(checkpoint, build_runner, driver, tmp_path):
    """Held to a checkpoint whose layers hold these numbers in float32."""
    source, copy = checkpoint("mixtral"), tmp_path / "model"
    shutil.copytree(source, copy)
    tensors = load_file(source / "model.safetensors")
    for name in filter(re.compile(r"\.([qkvo]_proj|w[123])\.weight$").search, tensors):
        tensors[name] = stands_for(tensors[name], "int8_per_channel_weight_only")
    for name in filter(re.compile(r"\.experts\.(gate_up|down)_proj$").search, tensors):
        tensors[name] = torch.stack([stands_for(part, "int8_per_channel_weight_only") for part in tensors[name]])
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    tokens, logprobs = played(driver(build_runner(source, quantization="int8_per_channel_weight_only")))
    expected_tokens, expected = played(driver(build_runner(copy)))
    assert tokens == expected_tokens
    np.testing.assert_allclose(logprobs, expected, atol=2e-4)
    assert not np.allclose(expected, played(driver(build_runner(source)))[1], atol=2e-4), "it is not the model itself"


def test_experts_in_fp8_have_the_bits_of_an_fp8_checkpoint(checkpoint, build_runner, driver, tmp_path):
    source, layers = tmp_path / "source", (*NAMES[:4], "w1", "w2", "w3")
    one_by_one(checkpoint("mixtral"), source)
    fp8(source, tmp_path / "offline", layers=layers)
    runner = build_runner(source, quantization="fp8_per_block")
    assert all(layer.mlp.experts.fused for layer in runner.model.layers), "one kernel takes all experts"
    tokens, logprobs = played(driver(runner))
    expected_tokens, expected = played(driver(build_runner(tmp_path / "offline")))
    assert tokens == expected_tokens and np.array_equal(logprobs, expected)
