"""Quantized checkpoints of models with latent attention, against float checkpoints that hold the same numbers."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from quantized_checkpoints import LATENT_LAYERS, LAYERS, awq, four_bits, fp8, gptq
from safetensors.torch import load_file, save_file
from test_quantized_checkpoints import VOCAB, edited, played
from tiny_models import MAX_MODEL_LEN

from penstock.engine.args import EngineArgs
from penstock.engine.config import ConfigError
from penstock.engine.loading.checkpoint import packed_modules
from penstock.engine.models.build import Build
from penstock.engine.models.config import parse_decoder_config
from penstock.engine.models.deepseek import LatentAttention
from penstock.engine.models.layers.linear_method import UnquantizedLinearMethod
from penstock.engine.models.layers.shard import Shard
from penstock.engine.quant.checkpoint import stored
from penstock.engine.quant.packed import PackedWeight
from penstock.engine.quant.parse import fp8 as fp8_config
from penstock.engine.quant.parse.config import parse_quantization
from penstock.kernels.ops import REFERENCE
from penstock.kernels.quantized_linear.reference import dequantized
from penstock.kernels.quantized_linear.rounding import Rounding, rounded_inputs

EXPERTS = LAYERS[4:]
FORMS = {
    "fp8": lambda source, target: fp8(source, target, layers=LATENT_LAYERS),
    "fp8-tensor": lambda source, target: fp8(source, target, None, LATENT_LAYERS),
    "w4a16": lambda source, target: four_bits(source, target, LATENT_LAYERS),
    "w4a16-experts": lambda source, target: four_bits(source, target, EXPERTS, [r"re:.*self_attn.*"]),
    # These pack outputs, among which queries and keys are reordered.
    "awq": lambda source, target: awq(source, target, layers=LATENT_LAYERS),
    "gptq": lambda source, target: gptq(source, target, layers=LATENT_LAYERS),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A DeepSeek V3 in float32. Blocks of 128 begin and end within its heads, and no size is a multiple of them."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(11)
    config = transformers.DeepseekV3Config(
        hidden_size=192,
        intermediate_size=224,
        moe_intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=160,
        kv_lora_rank=160,
        qk_rope_head_dim=16,
        qk_nope_head_dim=56,
        v_head_dim=48,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        vocab_size=VOCAB,
        initializer_range=0.1,
        max_position_embeddings=MAX_MODEL_LEN,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    path = tmp_path_factory.mktemp("latent")
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    """`made(form)`: the quantized checkpoint, and the float one."""
    known = {}

    def get(name: str):
        if name not in known:
            target = tmp_path_factory.mktemp("made") / name
            known[name] = target, FORMS[name](source, target)
        return known[name]

    return get


@pytest.fixture
def unrounded(monkeypatch):
    """Inputs of layers as they are: weights are all that counts."""
    monkeypatch.setattr(fp8_config, "ActivationScheme", lambda **_: None)


@pytest.mark.req("Q-24", "Q-27")
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("form", ["best", "reference"])
def test_the_numbers_of_a_checkpoint_are_served(name, form, made, build_runner, driver, unrounded):
    """The same tokens and log probabilities as the float weights that the numbers stand for."""
    quantized, plain = made(name)
    tokens, logprobs = played(driver(build_runner(quantized, form=form)))
    expected_tokens, expected = played(driver(build_runner(plain, form=form)))
    assert tokens == expected_tokens
    np.testing.assert_allclose(logprobs, expected, atol=3e-4)


@pytest.mark.parametrize("name", ["fp8", "w4a16"])
def test_bits_do_not_depend_on_chunks(name, made, build_runner, driver):
    runner = build_runner(made(name)[0], "bfloat16")
    tokens, logprobs = played(driver(runner))
    for chunk in (1, 7):
        again, others = played(driver(runner), chunk)
        assert again == tokens and np.array_equal(others, logprobs), chunk


def test_all_but_the_expansion_stays_packed(made, build_runner):
    """What is widened is what the documentation says, and an estimate of costs counts it so."""
    quantized, plain = made("fp8")
    runner, fields = build_runner(quantized, "bfloat16"), json.loads((quantized / "config.json").read_text())
    heads, rank = fields["num_attention_heads"], fields["kv_lora_rank"]
    expansion = heads * (fields["qk_nope_head_dim"] + fields["v_head_dim"]) * rank
    for layer in runner.model.layers:
        attention = layer.self_attn
        assert all(isinstance(linear._method, PackedWeight) for linear in attention._linears)
        assert not hasattr(layer.mlp, "experts") or layer.mlp.experts.fused, "one kernel takes all experts"
        widened = [attention._into_latents._packed.tensor, attention._from_latents._packed.tensor]
        assert all(tensor.dtype is torch.bfloat16 for tensor in widened)
        left = [value for value in vars(attention._expansion._method).values() if isinstance(value, torch.Tensor)]
        assert not [value for value in left if value.numel() > 1], "no packed copy beside it"
    costs = [EngineArgs(model=str(folder), dtype="bfloat16").config("cpu").model.cost for folder in (quantized, plain)]
    wide, share = costs[1].layer_weight_bytes, 0.5 * (1 + 2 / 128)
    kept = 2 * expansion * fields["num_hidden_layers"]
    assert costs[0].layer_weight_bytes == pytest.approx(share * (wide - kept) + kept, abs=1)


def test_packed_outputs_of_a_dense_family_that_rotates_neighbours_are_reordered(checkpoint, tmp_path, build_runner, driver):
    plain = awq(checkpoint("ernie4_5"), tmp_path / "awq", group=16)
    tokens, logprobs = played(driver(build_runner(tmp_path / "awq")))
    expected_tokens, expected = played(driver(build_runner(plain)))
    assert tokens == expected_tokens
    np.testing.assert_allclose(logprobs, expected, atol=3e-4)


def test_an_expansion_without_its_scale_and_with_a_wrong_one_fail_by_name(made, tmp_path, build_runner):
    name = "model.layers.1.self_attn.kv_b_proj.weight_scale_inv"

    def negative(tensors):
        tensors[name][1, 0] = -1.0

    with pytest.raises(ConfigError, match=rf"{name} holds a scale that is negative, at \[1, 0\]"):
        build_runner(edited(made("fp8")[0], tmp_path, negative))
    shutil.rmtree(tmp_path / "edited")
    with pytest.raises(ConfigError, match=f"lacks the tensors {name}"):
        build_runner(edited(made("fp8")[0], tmp_path, lambda tensors: tensors.pop(name)))


def test_an_expansion_in_an_ordinary_dtype_beside_packed_layers(source, tmp_path, build_runner, driver, unrounded):
    """The tensors decide, as for all layers."""
    layers = tuple(name for name in LATENT_LAYERS if name != "kv_b_proj")
    plain = fp8(source, tmp_path / "fp8", layers=layers)
    tokens, logprobs = played(driver(build_runner(tmp_path / "fp8")))
    expected_tokens, expected = played(driver(build_runner(plain)))
    assert tokens == expected_tokens
    np.testing.assert_allclose(logprobs, expected, atol=3e-4)


def test_scales_of_activations_may_be_powers_of_two():
    """`scale_fmt: ue8m0` of DeepSeek V3.1: the power that is not below the largest magnitude divided by 448."""
    scheme = Rounding(number="float8", dynamic=True, group=128, power_of_two=True)
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(2))
    x[3], x[4, :128], x[5, :128] = 0.0, 0.0, 448.0 * 2**-3  # the last one's scale is a power already
    expected = torch.empty_like(x)
    for row in range(len(x)):
        for part in (slice(0, 128), slice(128, 256)):
            largest = x[row, part].abs().max().item()
            scale = 2.0 ** math.ceil(math.log2(largest / 448)) if largest else 1.0
            expected[row, part] = (x[row, part] / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(rounded_inputs(x, scheme), expected)
    assert not torch.equal(rounded_inputs(x, Rounding(number="float8", dynamic=True, group=128)), expected)


def test_that_format_of_scales_is_read_from_the_checkpoint(made, tmp_path, build_runner, driver):
    folder = edited(made("fp8")[0], tmp_path, config=lambda raw: raw.update(scale_fmt="ue8m0"))
    _, powers = played(driver(build_runner(folder)))
    _, others = played(driver(build_runner(made("fp8")[0])))
    assert not np.array_equal(powers, others)


def test_weights_can_be_read_again(made, build_runner, driver, tmp_path):
    runner = build_runner(made("fp8")[0])
    before = played(driver(runner))
    other = tmp_path / "other"
    shutil.copytree(made("fp8")[0], other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.0.self_attn.kv_b_proj.weight_scale_inv"] *= 3
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    runner.reload_weights(str(other))
    assert not np.array_equal(played(driver(runner))[1], before[1])
    runner.reload_weights(str(made("fp8")[0]))
    again = played(driver(runner))
    assert again[0] == before[0] and np.array_equal(again[1], before[1])


def test_ranks_hold_the_heads_of_one_process(made):
    """A block's scale serves the heads of two ranks, and each rank widens its own."""
    folder = made("fp8")[0]
    config, tensors = (
        parse_decoder_config(json.loads((folder / "config.json").read_text())),
        load_file(folder / "model.safetensors"),
    )
    found = parse_quantization(json.loads((folder / "config.json").read_text()))
    assert found is not None
    method = stored(UnquantizedLinearMethod, found, packed_modules(folder), REFERENCE)

    def heads(shard: Shard) -> list[torch.Tensor]:
        name = "model.layers.1.self_attn"
        attention = LatentAttention(config, Build(REFERENCE, method, torch.float32, 64, shard, prefix=name), 1)
        parts = attention._expansion.weights() | attention._query.weights()
        for part, weight in parts.items():
            weight.load(tensors[f"{name}.{part}"])
        attention._query.finish()
        attention._take_apart(attention._expansion.widened())
        return [attention._into_latents.weight, attention._from_latents.weight, dequantized(attention._query._method.weight)]

    ranks = [heads(Shard(rank, 2)) for rank in range(2)]
    for whole, *parts in zip(heads(Shard()), *ranks, strict=True):
        assert torch.equal(torch.cat(parts), whole)
