"""`quantization_config` of checkpoints: what is understood, and what is refused by name."""

import pytest

from penstock.engine.config import ConfigError
from penstock.engine.quant.parse import fields
from penstock.engine.quant.parse.config import parse_quantization
from penstock.engine.quant.scheme import ActivationScheme, WeightScheme
from penstock.kernels.quantized_linear import reference

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
INPUTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}


def compressed(weights, form="pack-quantized", inputs=None, **more):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    } | more


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def parsed(raw):
    return parse_quantization({"quantization_config": raw})


def test_groups_are_held_to_the_steps_of_the_kernels():
    assert fields.STEP == reference.STEP


def test_a_checkpoint_without_it_is_not_quantized():
    assert parse_quantization({}) is None


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (compressed(INT4), WeightScheme(form="pack-quantized", bits=4, group=128)),
        (compressed(INT4 | {"symmetric": False}), WeightScheme(form="pack-quantized", bits=4, group=128, symmetric=False)),
        (compressed(INT4 | {"actorder": "static"}), WeightScheme(form="pack-quantized", bits=4, group=128)),
        (
            compressed(FLOAT8, "float-quantized", INPUTS),
            WeightScheme(form="float-quantized", bits=8, activations=ActivationScheme(number="float8", dynamic=True)),
        ),
        (
            compressed(FLOAT8 | {"strategy": "block", "block_structure": "128x128"}, "naive-quantized"),
            WeightScheme(form="float-quantized", bits=8, group=128, outputs=128),
        ),
        (
            compressed(FLOAT8 | {"type": "int", "strategy": "tensor"}, "naive-quantized"),
            WeightScheme(form="int-quantized", bits=8, outputs=None),
        ),
        (AWQ, WeightScheme(form="awq", bits=4, group=128, symmetric=False, scale="scales")),
        (GPTQ, WeightScheme(form="gptq", bits=4, group=128, symmetric=False, scale="scales", zeros_less_one=True)),
        (
            GPTQ | {"desc_act": True, "group_size": -1, "checkpoint_format": "gptq_v2"},
            WeightScheme(form="gptq", bits=4, symmetric=False, scale="scales"),
        ),
        (
            FP8 | {"weight_block_size": None, "activation_scheme": "static"},
            WeightScheme(
                form="float-quantized", bits=8, outputs=None, activations=ActivationScheme(number="float8", dynamic=False)
            ),
        ),
    ],
)
def test_schemes(raw, expected):
    found = parsed(raw)
    assert found.method == raw["quant_method"]
    assert found.scheme(["model.layers.0.mlp.down_proj"]) == expected


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            r"quant_method is 'bitsandbytes' \(supported: awq, compressed-tensors, fp8, gptq, mxfp4\)",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"quant_method is 'modelopt'"),
        ({"bits": 4}, r"quant_method is None"),
        (AWQ | {"bits": 3}, r"quantization_config.bits is 3 \(supported: 4\)"),
        (AWQ | {"version": "gemv"}, r"version is 'gemv'"),
        (AWQ | {"group_size": 36}, r"group_size is 36 \(supported: -1 and multiples of 8, such as 128\)"),
        (GPTQ | {"bits": 2}, r"bits is 2 \(supported: 4, 8\)"),
        (GPTQ | {"desc_act": True}, r"desc_act is true: .*act-order"),
        (GPTQ | {"checkpoint_format": "marlin"}, r"checkpoint_format is 'marlin' \(supported: gptq, gptq_v2\)"),
        (GPTQ | {"lm_head": True}, r"lm_head is True"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, r"dynamic is .*schemes that differ by module are not supported"),
        (FP8 | {"fmt": "e5m2"}, r"fmt is 'e5m2'"),
        (FP8 | {"scale_fmt": "e5m3"}, r"scale_fmt is 'e5m3' \(supported: None, ue8m0\)"),
        (FP8 | {"weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\] \(supported: \[128, 128\]"),
        (compressed(INT4, "nvfp4-pack-quantized"), r"group_0.format is 'nvfp4-pack-quantized' \(supported: pack-quantized"),
        (compressed(INT4 | {"num_bits": 3}), r"group_0.weights.num_bits is 3 \(supported: 4, 8\)"),
        (compressed(INT4 | {"actorder": "group"}), r"group_0.weights.actorder is 'group'"),
        (compressed(INT4 | {"strategy": "tensor_group"}), r"group_0.weights.strategy is 'tensor_group'"),
        (compressed(INT4 | {"group_size": 0}), r"group_0.weights.group_size is 0"),
        (compressed(INT4 | {"type": "float"}), r"group_0.weights.type is 'float', which pack-quantized does not hold"),
        (compressed(FLOAT8, "float-quantized", INPUTS | {"dynamic": "local"}), r"group_0.input_activations.dynamic is 'local'"),
        (compressed(INT4, sparsity_config={"format": "sparse-24-bitmask"}), r"sparsity_config.format is 'sparse-24-bitmask'"),
        (compressed(INT4, transform_config={"config_groups": {"u": {}}}), r"transform_config is set"),
        (compressed(INT4, quantization_status="frozen"), r"quantization_status is 'frozen'"),
        (compressed(INT4, config_groups={}), r"config_groups has no group"),
        (compressed(INT4, ignore=["re:("]), r"ignore has 're:\(', which is no regular expression"),
        (compressed(None), r"group_0.weights is None; activations alone cannot be quantized"),
        ("int4", r"quantization_config is 'int4', not an object"),
    ],
)
def test_what_is_not_supported_is_refused_by_field(raw, message):
    with pytest.raises(ConfigError, match=message):
        parsed(raw)


@pytest.mark.req("Q-14")
def test_groups_of_layers_have_schemes_of_their_own():
    raw = compressed(INT4)
    raw["config_groups"]["group_1"] = {"targets": ["re:.*down_proj$", "model.layers.0.self_attn.o_proj"]} | {
        "weights": FLOAT8,
        "format": "float-quantized",
    }
    found = parsed(raw)
    forms = {
        name: (scheme := found.scheme([name])) and scheme.form
        for name in (
            "model.layers.0.mlp.down_proj",
            "model.layers.0.self_attn.o_proj",
            "model.layers.1.self_attn.o_proj",
            "lm_head",
        )
    }
    assert list(forms.values()) == ["float-quantized", "float-quantized", "pack-quantized", None]


@pytest.mark.parametrize(
    ("raw", "kept"),
    [
        (AWQ | {"modules_to_not_convert": ["layers.3.self_attn"]}, ["model.layers.3.self_attn.q_proj"]),
        (FP8 | {"ignored_layers": ["model.layers.3.self_attn"]}, ["model.layers.3.self_attn.q_proj"]),
        (FP8 | {"modules_to_not_convert": ["q_proj"]}, ["model.layers.3.self_attn.q_proj", "model.layers.0.self_attn.q_proj"]),
        (GPTQ | {"dynamic": {r"-:.*\.3\.self_attn\.": {}}}, ["model.layers.3.self_attn.q_proj"]),
        (compressed(INT4, ignore=["re:.*layers.3.*q_proj$"]), ["model.layers.3.self_attn.q_proj"]),
    ],
)
def test_modules_that_are_left_out(raw, kept):
    names = ["model.layers.3.self_attn.q_proj", "model.layers.0.self_attn.q_proj", "model.layers.3.mlp.up_proj"]
    assert [name for name in names if parsed(raw).scheme([name]) is None] == kept
