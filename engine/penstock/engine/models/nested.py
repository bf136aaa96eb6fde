"""Which decoder is inside a model that reads more than text, and what its configuration leaves out."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from penstock.engine.config import ConfigError


class TextModel(NamedTuple):
    """A decoder that can be part of another model."""

    architecture: str
    defaults: Mapping[str, Any]
    """transformers' own: checkpoints hold what differs from them."""


_COMMON: Final = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
TEXT_MODELS: Final = {
    "gemma3_text": TextModel(
        "Gemma3ForCausalLM",
        {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8}
        | {"num_key_value_heads": 4, "max_position_embeddings": 131072, "eos_token_id": 1, "tie_word_embeddings": True},
    ),
    "llama": TextModel(
        "LlamaForCausalLM",
        _COMMON | {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048, "eos_token_id": 2},
    ),
    "mistral": TextModel(
        "MistralForCausalLM",
        _COMMON
        | {"vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8}
        | {"max_position_embeddings": 131072, "eos_token_id": 2},
    ),
    "qwen2_5_vl_text": TextModel(
        "Qwen2ForCausalLM",
        {
            "vocab_size": 152064,
            "hidden_size": 8192,
            "intermediate_size": 29568,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        }
        | {"num_key_value_heads": 8, "max_position_embeddings": 32768, "eos_token_id": 151645, "rms_norm_eps": 1e-5}
        | {"rope_theta": 1e6},
    ),
    "qwen3_vl_text": TextModel(
        "Qwen3ForCausalLM",
        _COMMON
        | {"vocab_size": 151936, "intermediate_size": 22016, "head_dim": 128, "max_position_embeddings": 128000}
        | {"rope_theta": 5e5},
    ),
    "qwen3_vl_moe_text": TextModel(
        "Qwen3MoeForCausalLM",
        {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16}
        | {"num_key_value_heads": 16, "max_position_embeddings": 128000, "rope_theta": 5e5, "norm_topk_prob": True}
        | {"moe_intermediate_size": 1408, "num_experts_per_tok": 4, "num_experts": 60},
    ),
    "qwen2": TextModel(
        "Qwen2ForCausalLM",
        _COMMON | {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768},
    ),
}
"""By `text_config.model_type`."""
_FLAT: Final = {"qwen2_5_vl": "qwen2_5_vl_text"}
"""By `model_type`, of models whose `config.json` may hold the decoder's fields among its own."""

_QWEN3_VL: Final = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
_ROPES: Final = {"qwen3_vl_text": _QWEN3_VL, "qwen3_vl_moe_text": _QWEN3_VL}
"""By `text_config.model_type`: what its rotary embedding has where `config.json` is silent."""
_TIED_OUTSIDE: Final = ("qwen3_vl_moe_text",)
"""`text_config.model_type` where `tie_word_embeddings` counts beside it alone: transformers ignores what it writes within."""


def text_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's own `config.json`, out of that of the model around it; `ConfigError` where it is not there or not known."""
    text = raw.get("text_config")
    if text is None and raw.get("model_type") in _FLAT:  # as written before transformers 5
        text = {name: value for name, value in raw.items() if name != "vision_config"} | {"model_type": _FLAT[raw["model_type"]]}
    if not isinstance(text, Mapping):
        raise ConfigError("config.json: text_config is missing")
    kind = text.get("model_type", "llama")
    if kind not in TEXT_MODELS:
        raise ConfigError(f"config.json: text_config.model_type {kind!r} is not supported ({', '.join(TEXT_MODELS)} are)")
    found = TEXT_MODELS[kind]
    fields = {**found.defaults, **text}
    if kind in _ROPES:
        field = "rope_scaling" if fields.get("rope_scaling") and not fields.get("rope_parameters") else "rope_parameters"
        fields |= {field: {**_ROPES[kind], **(fields.get(field) or {})}}
    inner = kind not in _TIED_OUTSIDE and bool(fields.get("tie_word_embeddings"))
    tied = inner or bool(raw.get("tie_word_embeddings"))
    return fields | {"architectures": [found.architecture], "tie_word_embeddings": tied}
