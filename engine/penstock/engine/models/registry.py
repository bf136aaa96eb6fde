"""Which class serves which architecture. Names alone, so that the frontend can tell what is known without torch."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from penstock.engine.config import ConfigError

if TYPE_CHECKING:
    from penstock.engine.models.build import Build
    from penstock.engine.models.config import DecoderConfig
    from penstock.engine.models.model import Model


class Family(NamedTuple):
    """How an architecture is served. Families that differ in their configuration alone share a class."""

    model: str
    """`module:Class`."""
    assumes: Mapping[str, Any] = {}
    """Fields of config.json where it is silent. Three are ours: `qkv_bias` says whether these three projections have one,
    `experts_bias` whether routers and experts do, and `router_in_float32` whether logits of a softmax are computed in float32."""
    qk_norm: bool = False
    """Whether each head's queries and keys are normalised."""
    norm_offset: float = 0.0
    """What is added to the weight of every norm."""
    norm: Literal["rms", "layer", "layer_bias"] = "rms"
    norm_eps: str = "rms_norm_eps"
    """The field that holds it."""
    gated_mlp: bool = True
    sinks: bool = False
    """Whether each head has a learned score that takes part in its softmax, without a value."""
    has_experts: bool = False
    has_latent: bool = False
    """Whether keys and values of all heads follow from one latent of each token."""
    rotates: Literal["all", "windowed", "listed"] = "all"
    """The layers with a rotary embedding: all, those with a window if there are any, or those that `no_rope_layers` lists."""
    interleaved_rope: bool = False
    """Whether checkpoints rotate neighbouring elements, not those half a head apart."""
    reads_images: bool = False
    """Whether the decoder is one part of the checkpoint, by its `text_config`, beside a vision tower."""


_LLAMA = "penstock.engine.models.llama:LlamaForCausalLM"
# What a window is in these is said by another field.
_NO_WINDOW = {"use_sliding_window": False}
_GEMMA = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA2 = {"sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA3 = {"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4}

_COHERE = {"layer_norm_eps": 1e-5, "tie_word_embeddings": True, "logit_scale": 0.0625}
_GLM = {
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
    "attention_out_bias": False,
    "partial_rotary_factor": 0.5,
}
_GPT_OSS = {
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "sliding_window": 128,
    "sliding_window_pattern": 2,
    "rope_theta": 150000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "experts_bias": True,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_LATENT = _NO_WINDOW | {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_DEEPSEEK_V3 = {
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
}
_MODELS = "penstock.engine.models"
_DEEPSEEK = f"{_MODELS}.deepseek:DeepseekForCausalLM"

FAMILIES = {
    "CohereForCausalLM": Family(
        f"{_MODELS}.cohere:CohereForCausalLM",
        _COHERE | {"rope_theta": 5e5},
        norm="layer",
        norm_eps="layer_norm_eps",
        interleaved_rope=True,
    ),
    "Cohere2ForCausalLM": Family(
        f"{_MODELS}.cohere:CohereForCausalLM",
        _COHERE | {"sliding_window": 4096, "sliding_window_pattern": 4},
        norm="layer",
        norm_eps="layer_norm_eps",
        rotates="windowed",
        interleaved_rope=True,
    ),
    "DeepseekV2ForCausalLM": Family(
        _DEEPSEEK,
        _LATENT
        | {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407, "topk_method": "greedy"}
        | {"router_in_float32": True},
        has_experts=True,
        has_latent=True,
    ),
    "DeepseekV3ForCausalLM": Family(_DEEPSEEK, _LATENT | _DEEPSEEK_V3, has_experts=True, has_latent=True),
    "Ernie4_5ForCausalLM": Family(
        _LLAMA,
        _NO_WINDOW | {"rms_norm_eps": 1e-5, "head_dim": 128, "rope_theta": 5e5, "tie_word_embeddings": True},
        interleaved_rope=True,
    ),
    "Exaone4ForCausalLM": Family(
        f"{_MODELS}.olmo2:Exaone4ForCausalLM",
        {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
        qk_norm=True,
        rotates="windowed",
    ),
    "GemmaForCausalLM": Family(
        f"{_MODELS}.gemma:Gemma1ForCausalLM",
        {"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True} | _NO_WINDOW,
        norm_offset=1.0,
    ),
    "Gemma2ForCausalLM": Family(f"{_MODELS}.gemma:GemmaForCausalLM", _GEMMA | _GEMMA2, norm_offset=1.0),
    "Gemma3ForCausalLM": Family(f"{_MODELS}.gemma:GemmaForCausalLM", _GEMMA | _GEMMA3, qk_norm=True, norm_offset=1.0),
    "Gemma3ForConditionalGeneration": Family(f"{_MODELS}.gemma3:Gemma3ForConditionalGeneration", reads_images=True),
    "GlmForCausalLM": Family(f"{_MODELS}.glm:GlmForCausalLM", _NO_WINDOW | _GLM, interleaved_rope=True),
    "Glm4ForCausalLM": Family(f"{_MODELS}.glm:Glm4ForCausalLM", _NO_WINDOW | _GLM, interleaved_rope=True),
    "Glm4MoeForCausalLM": Family(
        f"{_MODELS}.moe:MoeForCausalLM",
        _NO_WINDOW
        | {"rms_norm_eps": 1e-5, "attention_out_bias": False, "partial_rotary_factor": 0.5}
        | {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1}
        | {"scoring_func": "sigmoid", "norm_topk_prob": True, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1},
        has_experts=True,
    ),
    "GptOssForCausalLM": Family(f"{_MODELS}.gpt_oss:GptOssForCausalLM", _GPT_OSS, sinks=True, has_experts=True),
    "GraniteForCausalLM": Family(f"{_MODELS}.granite:GraniteForCausalLM", _NO_WINDOW | {"attention_multiplier": 1.0}),
    "KimiK2ForCausalLM": Family(_DEEPSEEK, _LATENT | _DEEPSEEK_V3, has_experts=True, has_latent=True),
    "LlamaForCausalLM": Family(_LLAMA, _NO_WINDOW),
    "LlavaForConditionalGeneration": Family(f"{_MODELS}.llava:LlavaForConditionalGeneration", reads_images=True),
    "LlavaNextForConditionalGeneration": Family(f"{_MODELS}.llava_next:LlavaNextForConditionalGeneration", reads_images=True),
    "MinistralForCausalLM": Family(_LLAMA, {"sliding_window": 4096}),
    "MixtralForCausalLM": Family(
        f"{_MODELS}.moe:MixtralForCausalLM",
        {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
        has_experts=True,
    ),
    "MistralForCausalLM": Family(_LLAMA, {"sliding_window": 4096}),
    "Olmo2ForCausalLM": Family(f"{_MODELS}.olmo2:Olmo2ForCausalLM", {"rms_norm_eps": 1e-5}),
    "Olmo3ForCausalLM": Family(
        f"{_MODELS}.olmo2:Olmo2ForCausalLM",
        {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "Phi3ForCausalLM": Family(f"{_MODELS}.phi3:Phi3ForCausalLM", {"rms_norm_eps": 1e-5}),
    "Qwen2_5_VLForConditionalGeneration": Family(f"{_MODELS}.qwen_vl:Qwen2_5_VLForConditionalGeneration", reads_images=True),
    "Qwen3VLForConditionalGeneration": Family(f"{_MODELS}.qwen_vl:Qwen3VLForConditionalGeneration", reads_images=True),
    "Qwen3VLMoeForConditionalGeneration": Family(f"{_MODELS}.qwen_vl:Qwen3VLMoeForConditionalGeneration", reads_images=True),
    "Qwen2ForCausalLM": Family(_LLAMA, _NO_WINDOW | {"qkv_bias": True, "max_window_layers": 28}),
    "Qwen2MoeForCausalLM": Family(
        f"{_MODELS}.moe:MoeForCausalLM",
        _NO_WINDOW
        | {"qkv_bias": True, "max_window_layers": 28, "num_experts": 60, "num_experts_per_tok": 4}
        | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
        has_experts=True,
    ),
    "Qwen3MoeForCausalLM": Family(
        f"{_MODELS}.moe:MoeForCausalLM",
        _NO_WINDOW | {"max_window_layers": 28, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        qk_norm=True,
        has_experts=True,
    ),
    "Qwen3ForCausalLM": Family(_LLAMA, _NO_WINDOW | {"head_dim": 128, "max_window_layers": 28}, qk_norm=True),
    "SeedOssForCausalLM": Family(_LLAMA, _NO_WINDOW | {"head_dim": 128, "attention_bias": True, "attention_out_bias": False}),
    "SmolLM3ForCausalLM": Family(_LLAMA, _NO_WINDOW | {"rope_theta": 2e6, "tie_word_embeddings": True}, rotates="listed"),
    "Starcoder2ForCausalLM": Family(
        f"{_MODELS}.starcoder2:Starcoder2ForCausalLM",
        {"norm_epsilon": 1e-5, "use_bias": True, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        norm="layer_bias",
        norm_eps="norm_epsilon",
        gated_mlp=False,
    ),
}
MISSING = {
    "Llama4ForCausalLM": "chunked attention and temperature scaling of queries",
    "Llama4ForConditionalGeneration": "chunked attention, temperature scaling of queries, and images",
    "Ministral3ForCausalLM": "scaling of queries by their position (llama_4_scaling_beta)",
    "Mistral3ForConditionalGeneration": "images",
    "Qwen3NextForCausalLM": "gated delta net layers and their recurrent state",
}
"""What the engine lacks for architectures that it knows and does not serve."""


def has_lm_head(architecture: str) -> bool:
    """Whether checkpoints of an architecture can generate: `MistralModel` is a `MistralForCausalLM` without its LM
    head, and `Gemma3TextModel` a `Gemma3ForCausalLM`."""
    return not architecture.endswith("Model")


def full_name(architecture: str) -> str:
    """The architecture's name with an LM head."""
    if has_lm_head(architecture):
        return architecture
    return architecture.removesuffix("Model").removesuffix("Text") + "ForCausalLM"


def family(architecture: str) -> Family:
    """What serves the architecture, with or without an LM head; ConfigError, with the known ones, where nothing does."""
    name = full_name(architecture)
    found = FAMILIES.get(name)
    if name in MISSING:
        raise ConfigError(f"architecture {architecture!r} is not supported: the engine lacks {MISSING[name]}")
    if found is None:
        raise ConfigError(f"architecture {architecture!r} is not supported (supported: {', '.join(sorted(FAMILIES))})")
    return found


def model_class(architecture: str) -> "Callable[[DecoderConfig, Build], Model]":
    """Imports the class that serves the architecture; ConfigError where there is none."""
    module, _, name = family(architecture).model.partition(":")
    return getattr(import_module(module), name)
