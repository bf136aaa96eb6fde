"""A configuration that says little is read as transformers reads it."""

import msgspec
import pytest

from penstock.engine.models.config import DecoderConfig, parse_decoder_config
from penstock.engine.models.registry import FAMILIES

SIZES = {
    "vocab_size": 307,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 9, "long_factor": [2.0] * 9}
VARIANTS = {
    "LlamaForCausalLM": [{}, {"attention_bias": True, "head_dim": 16}, {"rope_theta": 5e5, "tie_word_embeddings": True}],
    "MistralForCausalLM": [{}, {"sliding_window": None}, {"sliding_window": 64, "head_dim": 32}],
    "Qwen2ForCausalLM": [{}, {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}, {"sliding_window": 64}],
    "Qwen3ForCausalLM": [{}, {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}, {"rope_theta": 1e6}],
    "Gemma2ForCausalLM": [{}, {"head_dim": 32, "sliding_window": 64, "attn_logit_softcapping": None, "hidden_act": "gelu"}],
    "Gemma3ForCausalLM": [
        {},
        {"sliding_window_pattern": 3, "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"layer_types": ["full_attention", "sliding_attention"] * 3 + ["full_attention"], "query_pre_attn_scalar": 7},
    ],
    "Phi3ForCausalLM": [
        {},
        {"sliding_window": 64, "partial_rotary_factor": 0.5},
        {"partial_rotary_factor": 0.75} | {"rope_scaling": LONGROPE},
    ],
    "Olmo2ForCausalLM": [{}, {"rope_theta": 5e5}, {"attention_bias": True}],
    "Olmo3ForCausalLM": [{}, {"sliding_window": 64}],
    "Exaone4ForCausalLM": [{}, {"sliding_window": None, "layer_types": ["full_attention"] * 7}, {"sliding_window_pattern": 3}],
    "GemmaForCausalLM": [{}, {"head_dim": 32}],
    "MinistralForCausalLM": [{"head_dim": 32}],
    "SmolLM3ForCausalLM": [{}, {"no_rope_layer_interval": 3}, {"no_rope_layers": [1, 0, 0, 1, 1, 1, 0]}],
    "SeedOssForCausalLM": [{}, {"attention_out_bias": True}],
    "Ernie4_5ForCausalLM": [{}, {"use_bias": True}],
    "GraniteForCausalLM": [{}, {"attention_multiplier": 0.1, "residual_multiplier": 0.2, "logits_scaling": 8.0}],
    "GlmForCausalLM": [{}, {"attention_bias": False}],
    "Glm4ForCausalLM": [{}, {"partial_rotary_factor": 1.0}],
    "MixtralForCausalLM": [{}, {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 64}],
    "Qwen2MoeForCausalLM": [{}, {"mlp_only_layers": [1], "decoder_sparse_step": 2, "norm_topk_prob": True}],
    "Qwen3MoeForCausalLM": [{"head_dim": 32}, {"num_experts": 9, "num_experts_per_tok": 2, "moe_intermediate_size": 40}],
    "Glm4MoeForCausalLM": [{}, {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}],
    "DeepseekV2ForCausalLM": [
        {"num_experts_per_tok": 2},
        {"num_experts_per_tok": 2, "q_lora_rank": None, "kv_lora_rank": 32, "n_group": 4, "topk_group": 2}
        | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, "first_k_dense_replace": 1},
    ],
    "DeepseekV3ForCausalLM": [
        {},
        {"q_lora_rank": None, "v_head_dim": 32, "n_routed_experts": 16, "n_group": 4, "topk_group": 2, "rope_interleave": False},
    ],
    "KimiK2ForCausalLM": [{"n_routed_experts": 384, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}],
    "GptOssForCausalLM": [
        {},
        {"head_dim": 32, "sliding_window": 64, "num_local_experts": 8, "attention_bias": False, "swiglu_limit": 5.0},
        {"layer_types": ["full_attention"] * 7, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ],
    "CohereForCausalLM": [{}, {"logit_scale": 0.25}],
    "Cohere2ForCausalLM": [{}, {"sliding_window_pattern": 3, "sliding_window": 64}],
    "Starcoder2ForCausalLM": [{}, {"use_bias": False, "sliding_window": 64}],
}


def theirs(transformers, architecture: str, fields: dict):
    family = architecture.removesuffix("ForCausalLM")
    # Kimi K2 is DeepSeek V3 under its own name.
    name = {"Gemma3": "Gemma3TextConfig", "KimiK2": "DeepseekV3Config"}.get(family, f"{family}Config")
    return getattr(transformers, name)(**SIZES, **fields, pad_token_id=0)


def rope_of(config, kind: str) -> dict:
    return config.rope_parameters.get(kind) or config.rope_parameters


def kinds_of(config) -> list[str]:
    if (kinds := getattr(config, "layer_types", None)) is not None:
        return kinds
    windowed = getattr(config, "sliding_window", None) is not None
    return ["sliding_attention" if windowed else "full_attention"] * config.num_hidden_layers


def rotates(config, kinds: list[str]) -> list[bool]:
    """By layer, as its attention module decides."""
    if hasattr(config, "no_rope_layers"):
        return [bool(flag) for flag in config.no_rope_layers]
    if config.model_type in ("cohere2", "exaone4") and config.sliding_window is not None:
        return [kind == "sliding_attention" for kind in kinds]
    return [True] * len(kinds)


def test_every_family_is_compared():
    """Those around another family's decoder: by the tests of their towers."""
    assert VARIANTS.keys() == {name for name, family in FAMILIES.items() if not family.reads_images}


@pytest.mark.parametrize(
    ("architecture", "fields"), [(architecture, fields) for architecture, variants in VARIANTS.items() for fields in variants]
)
def test_is_read_as_transformers_reads_it(architecture, fields):
    transformers = pytest.importorskip("transformers")
    config = theirs(transformers, architecture, dict(fields))
    ours: DecoderConfig = parse_decoder_config(SIZES | {"architectures": [architecture]} | fields)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    eps = next(getattr(config, name) for name in ("rms_norm_eps", "layer_norm_eps", "norm_epsilon") if hasattr(config, name))
    assert ours.rms_norm_eps == eps
    if ours.latent is None:
        assert ours.head_size == head_size
    else:
        fields = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "q_lora_rank")
        assert msgspec.structs.astuple(ours.latent)[:5] == tuple(getattr(config, name) for name in fields)
        assert ours.latent.interleaved == getattr(config, "rope_interleave", True)
        assert ours.head_size == config.kv_lora_rank + head_size and ours.num_kv_heads == 1
    assert ours.tie_word_embeddings == config.tie_word_embeddings
    assert (
        ours.activation
        == {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}[getattr(config, "hidden_activation", None) or config.hidden_act]
    )
    scale = (getattr(config, "query_pre_attn_scalar", None) or getattr(config, "qk_head_dim", None) or head_size) ** -0.5
    assert ours.attention_scale == pytest.approx(getattr(config, "attention_multiplier", scale))
    assert ours.residual_scale == getattr(config, "residual_multiplier", 1.0)
    assert ours.embedding_scale == getattr(config, "embedding_multiplier", 1.0)
    assert ours.logits_scale == getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    assert ours.attention_softcap == (getattr(config, "attn_logit_softcapping", None) or 0.0)
    assert ours.logits_softcap == (getattr(config, "final_logit_softcapping", None) or 0.0)
    biased = getattr(config, "use_bias", getattr(config, "attention_bias", False))
    out_biased = False if architecture.startswith("Glm") else getattr(config, "attention_out_bias", biased)
    assert (ours.qkv_bias, ours.o_bias) == (biased or architecture.startswith("Qwen2"), out_biased)
    assert ours.mlp_bias == getattr(config, "use_bias", getattr(config, "mlp_bias", False))
    kinds = kinds_of(config)
    assert ours.windows == tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    assert [rope.type != "none" for rope in ours.ropes] == rotates(config, kinds)
    for rope, kind in zip(ours.ropes, kinds, strict=True):
        parameters = rope_of(config, kind)
        if rope.type == "none":
            continue
        assert (rope.type, rope.theta) == (parameters["rope_type"], parameters["rope_theta"])
        assert rope.size == int(head_size * parameters.get("partial_rotary_factor", 1.0))
        if rope.type == "longrope":
            assert rope.original_max_position_embeddings == parameters["original_max_position_embeddings"]


@pytest.mark.parametrize("architecture", [name for name in VARIANTS if FAMILIES[name].has_experts])
def test_experts_are_read_as_transformers_reads_them(architecture):
    transformers = pytest.importorskip("transformers")
    for fields in VARIANTS[architecture]:
        config = theirs(transformers, architecture, dict(fields))
        ours = parse_decoder_config(SIZES | {"architectures": [architecture]} | fields).experts
        assert ours is not None
        count = next(getattr(config, name) for name in ("num_local_experts", "num_experts") if hasattr(config, name))
        assert (ours.count, ours.top_k) == (count, config.num_experts_per_tok)
        assert ours.intermediate_size == getattr(config, "moe_intermediate_size", config.intermediate_size)
        assert ours.renormalise == getattr(config, "norm_topk_prob", True)
        if getattr(config, "topk_method", None) == "greedy":
            config.n_group = config.topk_group = 1
        assert ours.scale == getattr(config, "routed_scaling_factor", 1.0)
        assert (ours.groups, ours.top_groups) == (getattr(config, "n_group", 1), getattr(config, "topk_group", 1))
        plain, step = getattr(config, "mlp_only_layers", []), getattr(config, "decoder_sparse_step", 1)
        first = getattr(config, "first_k_dense_replace", 0)
        assert ours.layers == tuple(at >= first and at not in plain and (at + 1) % step == 0 for at in range(7))
