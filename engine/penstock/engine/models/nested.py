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
    "qwen2": TextModel(
        "Qwen2ForCausalLM",
        _COMMON | {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768},
    ),
}
"""By `text_config.model_type`."""


def text_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's own `config.json`, out of that of the model around it; `ConfigError` where it is not there or not known."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError("config.json: text_config is missing")
    kind = text.get("model_type", "llama")
    if kind not in TEXT_MODELS:
        raise ConfigError(f"config.json: text_config.model_type {kind!r} is not supported ({', '.join(TEXT_MODELS)} are)")
    found = TEXT_MODELS[kind]
    tied = bool(text.get("tie_word_embeddings", False)) or bool(raw.get("tie_word_embeddings", False))
    return {**found.defaults, **text, "architectures": [found.architecture], "tie_word_embeddings": tied}
