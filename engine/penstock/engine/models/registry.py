"""Which class serves which architecture. Names alone, so that the frontend can tell what is known without torch."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

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
    """Fields of config.json where it is silent. `qkv_bias` is ours: whether these three projections have one."""
    qk_norm: bool = False
    """Whether each head's queries and keys are normalised."""
    norm_offset: float = 0.0
    """What is added to the weight of every norm."""


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

FAMILIES = {
    "Gemma2ForCausalLM": Family("penstock.engine.models.gemma:GemmaForCausalLM", _GEMMA | _GEMMA2, norm_offset=1.0),
    "Gemma3ForCausalLM": Family("penstock.engine.models.gemma:GemmaForCausalLM", _GEMMA | _GEMMA3, qk_norm=True, norm_offset=1.0),
    "LlamaForCausalLM": Family(_LLAMA, _NO_WINDOW),
    "MistralForCausalLM": Family(_LLAMA, {"sliding_window": 4096}),
    "Olmo2ForCausalLM": Family("penstock.engine.models.olmo2:Olmo2ForCausalLM", {"rms_norm_eps": 1e-5}),
    "Phi3ForCausalLM": Family("penstock.engine.models.phi3:Phi3ForCausalLM", {"rms_norm_eps": 1e-5}),
    "Qwen2ForCausalLM": Family(_LLAMA, _NO_WINDOW | {"qkv_bias": True, "max_window_layers": 28}),
    "Qwen3ForCausalLM": Family(_LLAMA, _NO_WINDOW | {"head_dim": 128, "max_window_layers": 28}, qk_norm=True),
}


def has_lm_head(architecture: str) -> bool:
    """Whether checkpoints of an architecture can generate: `MistralModel` is a `MistralForCausalLM` without its LM
    head, and `Gemma3TextModel` a `Gemma3ForCausalLM`."""
    return not architecture.endswith("Model")


def family(architecture: str) -> Family:
    """What serves the architecture, with or without an LM head; ConfigError, with the known ones, where nothing does."""
    name = architecture
    if not has_lm_head(architecture):
        name = architecture.removesuffix("Model").removesuffix("Text") + "ForCausalLM"
    found = FAMILIES.get(name)
    if found is None:
        raise ConfigError(f"architecture {architecture!r} is not supported (supported: {', '.join(sorted(FAMILIES))})")
    return found


def model_class(architecture: str) -> "Callable[[DecoderConfig, Build], Model]":
    """Imports the class that serves the architecture; ConfigError where there is none."""
    module, _, name = family(architecture).model.partition(":")
    return getattr(import_module(module), name)
