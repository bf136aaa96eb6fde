"""What a checkpoint folder says, and how it is refused."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.engine.config import ConfigError
from penstock.engine.loading.checkpoint import read_model_config, resolve
from penstock.engine.models.config import parse_decoder_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def folder(path: Path, config: dict, files: tuple[str, ...] = ("model.safetensors",)) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    for name in files:
        (path / name).write_bytes(b"")
    return path


def test_reads_a_checkpoint(tmp_path):
    config = read_model_config(folder(tmp_path, LLAMA), served_names=("tiny", "alias"))
    assert (config.architecture, config.dtype, config.max_model_len) == ("LlamaForCausalLM", "bfloat16", 256)
    assert (config.served_names, config.eos_token_ids) == (("tiny", "alias"), (2,))


def test_the_callers_choices_win(tmp_path):
    config = read_model_config(folder(tmp_path, LLAMA), served_names=(), dtype="float32", max_model_len=100)
    assert (config.dtype, config.max_model_len, config.served_names) == ("float32", 100, (str(tmp_path),))


def test_generation_config_decides_what_ends_a_text(tmp_path):
    folder(tmp_path, LLAMA)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert read_model_config(tmp_path, served_names=()).eos_token_ids == (2, 7)


def test_both_spellings_mean_the_same():
    old = LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}}
    new = LLAMA | {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 500000.0}, "dtype": "bfloat16"}
    del new["torch_dtype"]
    assert parse_decoder_config(old) == parse_decoder_config(new)
    assert parse_decoder_config(new).ropes[0].theta == 500000.0


def test_gemma3s_two_embeddings_in_both_spellings():
    scaling = {"rope_type": "linear", "factor": 8.0}
    base = LLAMA | {
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 3,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
    }
    old = base | {"rope_theta": 5e5, "rope_local_base_freq": 5e3, "rope_scaling": scaling}
    kinds = {"full_attention": scaling | {"rope_theta": 5e5}, "sliding_attention": {"rope_type": "default", "rope_theta": 5e3}}
    new = base | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "rope_parameters": kinds}
    config = parse_decoder_config(old)
    assert config.windows == parse_decoder_config(new).windows == (8, 8, None)
    for ours, theirs in zip(config.ropes, parse_decoder_config(new).ropes, strict=True):
        assert (ours.type, ours.theta, ours.factor) == (theirs.type, theirs.theta, theirs.factor)
    assert [rope.theta for rope in config.ropes] == [5e3, 5e3, 5e5]
    assert config.max_position_embeddings == 256


def test_a_family_assumes_what_its_configuration_leaves_out():
    gemma = parse_decoder_config(LLAMA | {"architectures": ["Gemma2ForCausalLM"], "hidden_act": "gelu"})
    assert (gemma.head_size, gemma.activation, gemma.tie_word_embeddings) == (256, "gelu_tanh", True)
    assert (gemma.windows, gemma.attention_softcap, gemma.logits_softcap) == ((4096, None), 50.0, 30.0)
    qwen = parse_decoder_config(LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32})
    assert (qwen.qkv_bias, qwen.o_bias, qwen.windows) == (True, False, (None, None))
    some = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}
    assert parse_decoder_config(LLAMA | some).windows == (None, 32)
    mistral = parse_decoder_config(LLAMA | {"architectures": ["MistralForCausalLM"]})
    assert (mistral.qkv_bias, mistral.windows) == (False, (4096, 4096))
    assert parse_decoder_config(LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": None}).windows == (None, None)


def test_linear_scaling_lengthens_the_context():
    for scaling, length in (
        ({"type": "linear", "factor": 4.0}, 1024),
        ({"type": "dynamic", "factor": 4.0}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}, 256),
    ):
        assert parse_decoder_config(LLAMA | {"rope_scaling": scaling}).max_position_embeddings == length


def test_yarns_attention_factor():
    scaling = {"type": "yarn", "factor": 4.0}
    for fields, factor in (
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 0.7, "mscale_all_dim": 1.4}, (0.07 * math.log(4) + 1) / (0.14 * math.log(4) + 1)),
    ):
        assert parse_decoder_config(LLAMA | {"rope_scaling": scaling | fields}).ropes[0].attention_factor == pytest.approx(factor)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"'GPT2LMHeadModel' is not supported \(supported: Cohere2ForCausalLM, .*LlamaForCausalLM",
        ),
        ({"architectures": None}, "architectures is missing"),
        ({"architectures": ["Qwen3NextForCausalLM"]}, "the engine lacks gated delta net layers"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9},
            "num_experts_per_tok 9 exceeds num_local_experts 8",
        ),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 0}, "num_local_experts must be a positive whole number"),
        ({"architectures": ["Glm4MoeForCausalLM"], "n_group": 3}, "n_routed_experts 128 cannot be divided into 3 groups"),
        ({"architectures": ["Glm4MoeForCausalLM"], "n_group": 128}, "topk_group 1 of 128 groups of 1 experts leaves no 8"),
        ({"architectures": ["GraniteForCausalLM"], "logits_scaling": 0}, "logits_scaling must not be 0"),
        ({"architectures": ["CohereForCausalLM"], "use_qk_norm": True}, "use_qk_norm is set"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "no_rope_layers has 1 entries for 2 layers"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, "rope_scaling has the type 'proportional'"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope_scaling of type 'longrope' lacks long_factor"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "has 1 numbers in short_factor, not 8",
        ),
        ({"rope_parameters": {"rope_type": "llama3"}}, "lacks factor, low_freq_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"architectures": ["GptOssForCausalLM"], "swiglu_limit": 0}, "swiglu_limit must be above 0, not 0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types has chunked_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window must be a positive"),
        ({"hidden_size": None}, "hidden_size must be a positive"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads"),
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor 0.2 of head_dim 16 rotates 3 elements"),
        ({"torch_dtype": "float64"}, "dtype 'float64'"),
    ],
)
def test_refuses_by_name(tmp_path, change, sentence):
    with pytest.raises(ConfigError, match=sentence):
        read_model_config(folder(tmp_path, LLAMA | change), served_names=())


def test_refuses_more_context_than_the_checkpoint_has(tmp_path):
    with pytest.raises(ConfigError, match=r"--max-model-len 257: .* 256 tokens"):
        read_model_config(folder(tmp_path, LLAMA), served_names=(), max_model_len=257)


def test_pickled_weights_are_named_and_never_loaded(tmp_path):
    with pytest.raises(ConfigError, match=r"no \*.safetensors file; pytorch_model.bin would have to be unpickled"):
        read_model_config(folder(tmp_path, LLAMA, ("pytorch_model.bin",)), served_names=())


def test_gguf_is_named(tmp_path):
    """With the original's config.json beside it, and, as such files are published, without."""
    place = folder(tmp_path, LLAMA, ("model-Q4_K_M.gguf",))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"model-Q4_K_M.gguf is in GGUF, which is not supported"):
            read_model_config(place, served_names=())
        (place / "config.json").unlink(missing_ok=True)


def test_refuses_a_folder_without_a_model(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_model_config(tmp_path, served_names=())
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(ConfigError, match=r"config\.json: "):
        read_model_config(tmp_path, served_names=())


def test_resolves_paths_and_refuses_the_rest(tmp_path):
    assert resolve(str(tmp_path)) == resolve(tmp_path.as_uri()) == tmp_path.resolve()
    for uri, sentence in (
        (str(tmp_path / "nothing"), "does not exist"),
        ("ftp://host/model", "unknown scheme 'ftp'"),
        ("s3://bucket", "expected s3://bucket/path"),
        ("pvc://claim/model", "claims are mounted by Kubernetes"),
        ("hf://name", "expected hf://organisation/name"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            resolve(uri)
    with pytest.raises(ConfigError, match="revision"):
        resolve(str(tmp_path), revision="v1")


def test_needs_no_torch():
    code = "import sys, penstock.engine.loading.checkpoint; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_relative_file_uri_begins_at_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "models" / "a b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for uri in ("file://./models/a%20b", "file://models/a%20b", "models/a b", f"file://localhost{tmp_path}/models/a%20b"):
        assert resolve(uri) == tmp_path / "models" / "a b"
    with pytest.raises(ConfigError, match=f"{tmp_path}/models/none does not exist"):
        resolve("file://./models/none")
