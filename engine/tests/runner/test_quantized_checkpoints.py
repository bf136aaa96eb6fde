"""Checkpoints that were quantized: their numbers, against float checkpoints that hold the same ones, and against transformers."""

import json
import shutil

import numpy as np
import pytest
import torch
from quantized_checkpoints import AWQ_COLUMNS, awq, compressed, fp8, gptq, one_by_one, w8a8, whole_numbers, words
from safetensors.torch import load_file, save_file
from tiny_models import MAX_MODEL_LEN

from penstock.engine.args import EngineArgs
from penstock.engine.config import ConfigError, LoraConfig
from penstock.engine.loading.checkpoint import packed_modules
from penstock.engine.models.build import Build
from penstock.engine.models.layers.linear import QKVParallelLinear, RowParallelLinear
from penstock.engine.models.layers.linear_method import UnquantizedLinearMethod
from penstock.engine.models.layers.projection import LinearLayer, Projection
from penstock.engine.models.layers.shard import Shard, Span
from penstock.engine.quant.checkpoint import StoredLinearMethod, stored
from penstock.engine.quant.parse.config import parse_quantization
from penstock.engine.quant.scheme import WeightScheme
from penstock.engine.sampling import SamplingParams
from penstock.kernels.cpu.isa import available
from penstock.kernels.integer_linear.reference import IntegerWeight, integer_linear
from penstock.kernels.integer_linear.reference import whole_numbers as whole_numbers_of
from penstock.kernels.ops import REFERENCE
from penstock.kernels.quantized_linear.reference import dequantized
from penstock.kernels.quantized_linear.rounding import Rounding, rounded_inputs

VOCAB = 257
GREEDY = SamplingParams(max_tokens=100, temperature=0.0, logprobs=VOCAB)
TOKENS = 6


def prompt(length: int = 70) -> list[int]:
    return np.random.default_rng(1).integers(0, VOCAB, length).tolist()


def played(play, chunk: int = 1000) -> tuple[list[int], np.ndarray]:
    """The tokens of one greedy request, and all log probabilities by token id."""
    sequence, tokens, logprobs = play.admit(prompt(), GREEDY), list[int](), list[np.ndarray]()
    while len(tokens) < TOKENS:
        result = play.step([(sequence, min(chunk, len(sequence.tokens) - sequence.computed))])
        if result.counts[0]:
            tokens.append(int(result.token_ids[0, 0]))
            logprobs.append(result.logprobs.top_logprobs[0][np.argsort(result.logprobs.top_ids[0])])
    return tokens, np.array(logprobs)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A Llama in float32 whose layers' sizes are whole groups; of FP8's blocks of 128 the last is a half."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCAB,
        initializer_range=0.1,
        max_position_embeddings=MAX_MODEL_LEN,
        eos_token_id=None,
        bos_token_id=None,
    )
    path = tmp_path_factory.mktemp("source")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


BY_HAND = {
    "awq": awq,
    "awq-128-symmetric": lambda source, target: awq(source, target, group=64, zero_point=False),
    "gptq": gptq,
    "gptq-v2-asymmetric": lambda source, target: gptq(source, target, form="gptq_v2", symmetric=False),
    "gptq-asymmetric": lambda source, target: gptq(source, target, group=64, symmetric=False),
    "gptq-8": lambda source, target: gptq(source, target, bits=8, group=-1),
}
PRESETS = {
    "W4A16": {"group_size": 64},
    "W4A16_ASYM": {"group_size": 32},
    "W8A16": {"group_size": 64},
    "W8A16-channel": {"strategy": "channel", "group_size": None},
    "MXFP4A16": {},
}
ROUNDED = ("W8A8", "FP8_DYNAMIC", "FP8", "FP8_BLOCK")
"""Schemes that round activations too."""


def change_weights(fields: dict):
    return lambda scheme: scheme["weights"].update(fields)


@pytest.fixture(scope="module")
def by_hand(source, tmp_path_factory):
    made = {}

    def get(name: str):
        if name not in made:
            target = tmp_path_factory.mktemp("hand") / name
            made[name] = target, BY_HAND[name](source, target)
        return made[name]

    return get


@pytest.fixture(scope="module")
def by_library(source, tmp_path_factory):
    pytest.importorskip("compressed_tensors", reason="`make setup` installs it")
    made = {}

    def get(name: str):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("library") / name
            origin = source
            if name == "FP8_BLOCK":  # the library divides whole blocks alone
                origin = made[name].with_name("blocks")
                widen(source, origin)
            compressed(origin, made[name], name.removesuffix("-channel"), change_weights(PRESETS.get(name, {})))
        return made[name]

    return get


def widen(source, target):
    """The model with MLPs of 384."""
    shutil.copytree(source, target)
    raw = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(raw | {"intermediate_size": 384}))
    tensors, torch_random = load_file(source / "model.safetensors"), torch.Generator().manual_seed(3)
    for name, value in tensors.items():
        if "mlp.down" in name:
            tensors[name] = torch.cat((value, torch.randn(256, 64, generator=torch_random) * 0.1), 1)
        elif "mlp" in name:
            tensors[name] = torch.cat((value, torch.randn(64, 256, generator=torch_random) * 0.1))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


@pytest.mark.req("Q-27")
@pytest.mark.parametrize("form", [*(isa.name for isa in available()), "reference"])
@pytest.mark.parametrize("name", BY_HAND)
def test_packed_by_hand(name, form, by_hand, build_runner, driver):
    """The same tokens and log probabilities as the float weights that the numbers stand for."""
    quantized, plain = by_hand(name)
    tokens, logprobs = played(driver(build_runner(quantized, form=form)))
    expected_tokens, expected = played(driver(build_runner(plain, form=form)))
    assert tokens == expected_tokens
    np.testing.assert_allclose(logprobs, expected, atol=2e-4)


def decompressed(path, rounds):
    """The model in transformers, with float weights; its linear layers may round their inputs as the library has it."""
    import transformers
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    loading = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=loading)
    group = json.loads((path / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    args = QuantizationScheme(**group).input_activations
    static = load_file(path / "model.safetensors")

    def rounding(name):
        def rounded(module, inputs):
            if args.dynamic:
                scale, zero = compute_dynamic_scales_and_zp(inputs[0], args, module)
            else:
                scale, zero = static[f"{name}.input_scale"], torch.zeros(1)
            return (fake_quantize(inputs[0], scale, zero, args),)

        return rounded

    for name, module in model.named_modules():
        if rounds and args is not None and isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(rounding(name))
    return model


@pytest.mark.req("Q-14", "Q-27")
@pytest.mark.parametrize("name", [*PRESETS, *ROUNDED])
def test_by_compressed_tensors(name, by_library, build_runner, driver):
    """Held to transformers with the library's own decompression of weights and rounding of activations."""
    path = by_library(name)
    tokens, logprobs = played(driver(build_runner(path)))
    expected, unrounded = (expected_logprobs(decompressed(path, rounds), tokens) for rounds in (True, False))
    if name not in ROUNDED:
        np.testing.assert_allclose(logprobs, expected, atol=3e-4)
        return
    # Next to a tie, the last bit of a sum decides which way an activation is rounded: equality is shown below, for one layer.
    assert np.abs(logprobs - expected).mean() < 0.5 * np.abs(logprobs - unrounded).mean()


def expected_logprobs(model, tokens):
    """Of the tokens that follow the prompt."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt() + tokens[:-1]])).logits[0, -TOKENS:]
    return logits.log_softmax(1).numpy()


@pytest.mark.req("Q-23")
@pytest.mark.parametrize("name", ROUNDED)
def test_activations_are_rounded_bit_by_bit_as_by_compressed_tensors(name):
    lifecycle = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward", reason="`make setup` installs it")
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    args = preset_name_to_scheme(name, ["Linear"]).input_activations
    scheme = Rounding(number="int8" if args.type == "int" else "float8", dynamic=args.dynamic, group=args.group_size)
    x = torch.randn(70, 256, generator=torch.Generator().manual_seed(2))
    x[3], x[4, :128] = 0.0, 0.0
    scale, zero = compute_dynamic_scales_and_zp(x[None], args, None) if args.dynamic else (torch.tensor([0.01]), torch.zeros(1))
    expected = lifecycle.fake_quantize(x[None], scale, zero, args)[0]
    assert torch.equal(rounded_inputs(x, scheme, torch.tensor([0.01])), expected)


@pytest.mark.req("Q-05")
@pytest.mark.parametrize("number", ["int8", "float8"])
def test_dynamic_scales_follow_the_inputs_and_static_ones_look_at_none(number, monkeypatch):
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(4))
    dynamic = Rounding(number=number, dynamic=True)
    assert torch.equal(rounded_inputs(8 * x, dynamic), 8 * rounded_inputs(x, dynamic))
    static, scale = Rounding(number=number, dynamic=False), torch.tensor([0.01])
    assert not torch.equal(rounded_inputs(8 * x, static, scale), 8 * rounded_inputs(x, static, scale))
    monkeypatch.setattr(torch.Tensor, "amax", None, raising=False)
    rounded_inputs(x, static, scale)


def test_a_static_zero_point_moves_the_range():
    """Numbers from -128 to 127 stand for 0 to 2.55 where the zero point is -128."""
    scheme = Rounding(number="int8", dynamic=False)
    rounded = rounded_inputs(torch.tensor([[-1.0, 0.004, 1.236, 9.0]]), scheme, torch.tensor([0.01]), torch.tensor([-128.0]))
    torch.testing.assert_close(rounded, torch.tensor([[0.0, 0.0, 1.24, 2.55]]))


@pytest.mark.parametrize("block", [128, None])
def test_fp8_with_rounded_activations(block, source, tmp_path, build_runner, driver):
    """Near the float weights that the numbers stand for: the rounding of activations is all that differs."""
    quantized = tmp_path / "fp8"
    plain = fp8(source, quantized, block)
    _, logprobs = played(driver(build_runner(quantized)))
    _, expected = played(driver(build_runner(plain)))
    difference = np.abs(logprobs[0] - expected[0]).mean()
    assert 1e-4 < difference < 0.5, "rounded, and not more"


@pytest.mark.req("Q-24")
def test_fp8_weights_stand_for_the_numbers_times_their_blocks_scales(source, tmp_path, build_runner, driver):
    """Without rounded activations the model is that of the dequantized weights, on CPUs that know no FP8."""
    quantized = tmp_path / "fp8"
    plain = fp8(source, quantized)
    runner = build_runner(quantized)
    for layer in runner.model.layers:
        for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
            linear._method._rounding = None
    tokens, logprobs = played(driver(runner))
    expected_tokens, expected = played(driver(build_runner(plain)))
    assert tokens == expected_tokens
    np.testing.assert_allclose(logprobs, expected, atol=2e-4)


@pytest.mark.parametrize("name", ["awq", "gptq-8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_chunks_or_room_for_adapters(name, dtype, by_hand, build_runner, driver):
    runner = build_runner(by_hand(name)[0], dtype)
    tokens, logprobs = played(driver(runner))
    with_lora = build_runner(by_hand(name)[0], dtype, lora=LoraConfig())
    for play, chunk in ((driver(runner), 1), (driver(runner), 7), (driver(with_lora), 1000)):
        again, others = played(play, chunk)
        assert again == tokens and np.array_equal(others, logprobs), chunk


@pytest.mark.parametrize("name", ["W8A8", "FP8_BLOCK"])
def test_rounded_activations_do_not_depend_on_chunks(name, by_library, build_runner, driver):
    runner = build_runner(by_library(name), "bfloat16")
    tokens, logprobs = played(driver(runner))
    for chunk in (1, 7):
        again, others = played(driver(runner), chunk)
        assert again == tokens and np.array_equal(others, logprobs), chunk


@pytest.mark.req("Q-08")
def test_weights_stay_packed_in_memory(by_hand, build_runner):
    """Four bits with scales and zero points for each 32 take less than 0.30 of bfloat16."""
    runner = build_runner(by_hand("awq")[0], "bfloat16")
    for layer in runner.model.layers:
        for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
            method = linear._method
            assert isinstance(method, StoredLinearMethod)
            held = [value for value in vars(method).values() if isinstance(value, torch.Tensor)]
            assert not held, "nothing but the packed weight"
            assert method.weight.nbytes <= 0.30 * 2 * method.weight.out_features * method.weight.in_features


def test_experts_of_a_mixture(checkpoint, tmp_path, build_runner, driver):
    """Mixtral as AutoAWQ stores it: each expert's layers by names of their own, the router in float."""
    source, names = tmp_path / "source", ("q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3")
    one_by_one(checkpoint("mixtral"), source)
    plain = awq(source, tmp_path / "awq", group=16, layers=names)
    runner = build_runner(tmp_path / "awq")
    assert all(layer.mlp.experts.fused for layer in runner.model.layers), "one kernel takes all experts"
    tokens, logprobs = played(driver(runner))
    expected_tokens, expected = played(driver(build_runner(plain)))
    assert tokens == expected_tokens
    np.testing.assert_allclose(logprobs, expected, atol=2e-4)


@pytest.mark.req("Q-23")
@pytest.mark.parametrize("form", ["best", "reference"])
def test_weights_and_inputs_of_eight_bits_meet_as_whole_numbers(form, by_library, build_runner):
    """Each layer has the bits that the reference defines, which dequantized numbers do not have."""
    runner, differ = build_runner(by_library("W8A8"), "bfloat16", form=form), 0
    for layer in runner.model.layers:
        for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
            method = linear._method
            assert isinstance(method.weight, IntegerWeight) and method.weight.nbytes < 0.6 * 2 * method.weight.values.numel()
            x = torch.randn(9, method.weight.in_features).bfloat16()
            rule, found = Rounding("int8", True), method.apply(x)
            assert torch.equal(found, integer_linear(x, method.weight, rule, None, None, None))
            scales = method.weight.scales.flatten()[: method.weight.out_features, None]
            wide = whole_numbers_of(method.weight).float() * scales
            differ += int((found != (rounded_inputs(x, rule).float() @ wide.T).bfloat16()).sum())
    assert differ > 0, "rounded inputs in bfloat16 give other bits"


def test_experts_of_whole_numbers(checkpoint, tmp_path, build_runner, driver):
    """One kernel takes them all; alone, chunked and of one expert after the other they have the same bits."""
    source, names = tmp_path / "source", ("q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3")
    one_by_one(checkpoint("mixtral"), source)
    plain = w8a8(source, tmp_path / "w8a8", layers=names)
    runner = build_runner(tmp_path / "w8a8", "bfloat16")
    mixture = runner.model.layers[0].mlp.experts
    assert mixture.fused and all(isinstance(method.weight, IntegerWeight) for method in mixture._gate_up)
    tokens, logprobs = played(driver(runner))
    again, others = played(driver(runner), 7)
    assert again == tokens and np.array_equal(others, logprobs)
    _, expected = played(driver(build_runner(plain, "bfloat16")))
    assert 0 < np.abs(logprobs[0] - expected[0]).mean() < 0.2, "the rounding of inputs is all that differs"


@pytest.mark.req("Q-13")
def test_formats_that_hold_the_same_numbers_become_the_same_weight(source):
    """AWQ's, GPTQ's and compressed-tensors' order of packed numbers end as one."""
    weight = load_file(source / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    numbers, zeros, scales = whole_numbers(weight, 4, 32, symmetric=False)
    of_scales = torch.from_numpy(scales)
    along_outputs = words(zeros.T, 4).T
    formats = {
        "awq": {"qweight": words(numbers.T, 4, AWQ_COLUMNS), "qzeros": words(zeros.T, 4, AWQ_COLUMNS), "scales": of_scales.T},
        "gptq": {"qweight": words(numbers, 4).T, "qzeros": words(zeros.T, 4), "scales": of_scales.T},
        "pack-quantized": {"weight_packed": words(numbers, 4), "weight_zero_point": along_outputs, "weight_scale": of_scales},
    }
    projection = Projection("down_proj", Span(320, 0, 320), Span(256, 0, 256), 0)
    linear = LinearLayer("mlp.down_proj", (projection,), bias=False, dtype=torch.float32)
    made = []
    for form, tensors in formats.items():
        scale = "weight_scale" if form == "pack-quantized" else "scales"
        method = StoredLinearMethod(linear, WeightScheme(form=form, bits=4, group=32, symmetric=False, scale=scale), REFERENCE)
        for name, value in tensors.items():
            method.load(projection, name, value.contiguous())
        method.finish()
        made.append(method.weight)
    for other in made[1:]:
        assert all(torch.equal(getattr(other, field), getattr(made[0], field)) for field in ("values", "scales", "zeros"))


@pytest.mark.req("Q-12")
def test_layers_choose_their_method_once(by_hand, build_runner, driver, monkeypatch):
    chosen = []
    original = StoredLinearMethod.__init__

    def noted(self, layer, *args, **more):
        chosen.append(layer.name)
        original(self, layer, *args, **more)

    monkeypatch.setattr(StoredLinearMethod, "__init__", noted)
    played(driver(build_runner(by_hand("awq")[0])))
    assert len(chosen) == len(set(chosen)) == 2 * 4


def layer(kind: str, folder, shard: Shard) -> torch.Tensor:
    """A rank's part of a layer of the checkpoint, in float32."""
    found = parse_quantization(json.loads((folder / "config.json").read_text()))
    method = stored(UnquantizedLinearMethod, found, packed_modules(folder), REFERENCE)
    build = Build(REFERENCE, method, torch.float32, 64, shard, prefix="model.layers.0.self_attn")
    if kind == "qkv":
        made = QKVParallelLinear(256, 4, 2, 64, False, build)
    else:
        made = RowParallelLinear("o_proj", shard.span(256, "inputs"), 256, False, build)
    tensors = load_file(folder / "model.safetensors")
    for name, weight in made.weights().items():
        weight.load(tensors[f"model.layers.0.self_attn.{name}"])
    made.finish()
    return dequantized(made._method.weight)


@pytest.mark.parametrize("name", [*BY_HAND, "fp8", "W4A16_ASYM", "W8A16-channel", "MXFP4A16", "FP8"])
def test_ranks_hold_the_numbers_of_one_process(name, request, source, tmp_path):
    if name == "fp8":
        folder = tmp_path / "fp8"
        fp8(source, folder, 128)
    else:
        folder = request.getfixturevalue("by_hand")(name)[0] if name in BY_HAND else request.getfixturevalue("by_library")(name)
    parts = [layer("qkv", folder, Shard(rank, 2)).split([128, 64, 64]) for rank in range(2)]
    assert torch.equal(torch.cat([torch.cat(part) for part in zip(*parts, strict=True)]), layer("qkv", folder, Shard()))
    parts = [layer("o", folder, Shard(rank, 2)) for rank in range(2)]
    assert torch.equal(torch.cat(parts, 1), layer("o", folder, Shard()))


def test_ranks_that_would_cut_a_group_are_refused_with_the_arithmetic(by_hand):
    message = r"model.layers.0.self_attn.o_proj.scales: a rank's features 0 to 32 of 256 cut through an entry, which holds 64"
    with pytest.raises(ValueError, match=message):
        layer("o", by_hand("gptq-asymmetric")[0], Shard(0, 8))


# --- bad input ---


def edited(folder, tmp_path, change=None, config=None):
    """A copy whose tensors or quantization_config were changed."""
    copy = tmp_path / "edited"
    shutil.copytree(folder, copy)
    if change is not None:
        tensors = load_file(copy / "model.safetensors")
        change(tensors)
        save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    if config is not None:
        raw = json.loads((copy / "config.json").read_text())
        config(raw["quantization_config"])
        (copy / "config.json").write_text(json.dumps(raw))
    return copy


SCALES = "model.layers.1.mlp.down_proj.scales"


@pytest.mark.parametrize(
    ("value", "what"), [(-0.5, "negative"), (0.0, "zero"), (float("nan"), "not finite"), (float("inf"), "not finite")]
)
def test_a_wrong_scale_fails_the_load_by_layer_and_tensor(value, what, by_hand, tmp_path, build_runner):
    def change(tensors):
        tensors[SCALES][2, 5] = value

    with pytest.raises(ConfigError, match=rf"model.layers.1.mlp.down_proj.scales holds a scale that is {what}, at \[\d+, \d+\]"):
        build_runner(edited(by_hand("awq")[0], tmp_path, change))


def test_a_missing_scale_and_one_that_nothing_takes_fail_the_load(by_hand, tmp_path, build_runner):
    def change(tensors):
        tensors["model.layers.1.mlp.act_fn.input_scale"] = tensors.pop(SCALES)

    with pytest.raises(
        ConfigError, match=r"lacks the tensors model.layers.1.mlp.down_proj.scales and has the unexpected tensors"
    ):
        build_runner(edited(by_hand("awq")[0], tmp_path, change))


def test_a_packed_tensor_of_the_wrong_shape_is_named(by_hand, tmp_path, build_runner):
    def change(tensors):
        name = "model.layers.0.self_attn.o_proj.qweight"
        tensors[name] = tensors[name][:, :-1].contiguous()

    with pytest.raises(
        ConfigError, match=r"tensor model.layers.0.self_attn.o_proj.qweight: shape \[256, 31\], expected \[256, 32\]"
    ):
        build_runner(edited(by_hand("awq")[0], tmp_path, change))


def test_a_value_that_is_not_a_number_is_named(source, tmp_path, build_runner):
    fp8(source, tmp_path / "fp8")

    def change(tensors):
        tensors["model.layers.0.self_attn.k_proj.weight"].view(torch.uint8)[3, 4] = 0x7F

    with pytest.raises(ConfigError, match=r"model.layers.0.self_attn.k_proj.weight holds a value that is not a number"):
        build_runner(edited(tmp_path / "fp8", tmp_path, change))


def test_a_zero_point_of_inputs_beyond_eight_bits_is_named(by_library, tmp_path, build_runner):
    def change(tensors):
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            module = name.removesuffix("weight_scale")
            tensors[f"{module}input_scale"] = torch.tensor([0.01])
            tensors[f"{module}input_zero_point"] = torch.tensor([300 if "layers.1.mlp.down" in module else 5], dtype=torch.int32)

    def static(raw):
        fields = {"dynamic": False, "strategy": "tensor", "symmetric": False}
        raw["config_groups"]["group_0"]["input_activations"].update(fields)

    message = "model.layers.1.mlp.down_proj.input_zero_point is 300: a zero point of eight bits is from -128 to 127"
    with pytest.raises(ConfigError, match=message):
        build_runner(edited(by_library("W8A8"), tmp_path, change, static))


def test_parts_of_a_fused_layer_that_disagree_are_refused(by_hand, tmp_path, build_runner):
    folder = edited(
        by_hand("awq")[0], tmp_path, config=lambda raw: raw.update(modules_to_not_convert=["layers.0.self_attn.k_proj"])
    )
    with pytest.raises(
        ConfigError, match=r"layers.0.self_attn.qkv_proj: its parts .* \(q_proj: awq, 4 bits, .*k_proj: not quantized"
    ):
        build_runner(folder)


def test_act_order_is_found_in_the_tensors_too(by_hand, tmp_path, build_runner):
    def change(tensors):
        name = "model.layers.0.mlp.down_proj.g_idx"
        tensors[name] = tensors[name].flip(0).contiguous()

    with pytest.raises(
        ConfigError, match=r"model.layers.0.mlp.down_proj.g_idx assigns inputs to groups out of order \(act-order\)"
    ):
        build_runner(edited(by_hand("gptq")[0], tmp_path, change))


def test_names_that_leave_out_no_layer_are_logged(by_hand, tmp_path, build_runner, caplog):
    folder = edited(by_hand("awq")[0], tmp_path, config=lambda raw: raw.update(modules_to_not_convert=["visual", "lm_head"]))
    with caplog.at_level("WARNING"):
        build_runner(folder)
    assert "quantization_config leaves out what no layer is called: visual" in caplog.text
    assert "lm_head" not in caplog.text


def test_what_does_not_go_together_is_refused(by_hand):
    model = str(by_hand("awq")[0])
    with pytest.raises(ConfigError, match=r"--quantization int4_per_group_32: the checkpoint is quantized already \(awq\)"):
        EngineArgs(model=model, quantization="int4_per_group_32").config("cpu")
    assert EngineArgs(model=model, quantization="awq").config("cpu").model.quantization is None, "as other engines' users say it"
    with pytest.raises(ConfigError, match=r"--quantization gptq: the checkpoint is quantized already \(awq\)"):
        EngineArgs(model=model, quantization="gptq").config("cpu")
    with pytest.raises(ConfigError, match="--quantization awq: the checkpoint is not quantized; int8_per_channel_weight_only, "):
        EngineArgs(model=str(by_hand("awq")[1]), quantization="awq").config("cpu")
    with pytest.raises(ConfigError, match="--load-format dummy makes no quantized weights"):
        EngineArgs(model=model, load_format="dummy").config("cpu")


def test_the_cost_of_a_step_counts_the_bytes_that_are_stored(by_hand):
    quantized, plain = by_hand("awq")
    costs = [EngineArgs(model=str(folder), dtype="bfloat16").config("cpu").model.cost for folder in (quantized, plain)]
    assert costs[0].layer_weight_bytes / costs[1].layer_weight_bytes == pytest.approx(0.28125)
