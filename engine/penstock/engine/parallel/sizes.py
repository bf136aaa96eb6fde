"""Which numbers of ranks a model can be divided among. Light to import."""

from typing import Final

from penstock.engine.config import ConfigError
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.layers.shard import Shard
from penstock.engine.models.registry import full_name

_FAMILIES: Final = (
    *("Cohere", "Cohere2", "Ernie4_5", "Exaone4", "Gemma", "Gemma2", "Gemma3", "Glm", "Glm4", "Granite", "Llama", "Ministral"),
    *("Mistral", "Olmo2", "Olmo3", "Phi3", "Qwen2", "Qwen3", "SeedOss", "SmolLM3", "Starcoder2"),
)
DIVIDED: Final = frozenset(f"{family}ForCausalLM" for family in _FAMILIES) | {"LlavaForConditionalGeneration"}
"""Architectures whose every layer is known to give the same on several ranks as on one."""


def check_sizes(architecture: str, config: DecoderConfig, world: int) -> None:
    """ConfigError, with the arithmetic, where a layer cannot be divided among so many ranks. The vocabulary always can be: it is
    padded."""
    if full_name(architecture) not in DIVIDED:
        known = ", ".join(sorted(DIVIDED))
        raise ConfigError(f"--tensor-parallel-size {world}: {architecture} is not divided among ranks so far (divided: {known})")
    shard = Shard(0, world)
    try:
        shard.span(config.num_heads, "num_attention_heads")
        shard.kv_heads(config.num_kv_heads)
        shard.span(config.intermediate_size, "intermediate_size")
    except ValueError as error:
        fits = [str(size) for size in range(1, config.num_heads + 1) if _divides(config, size)]
        raise ConfigError(f"--tensor-parallel-size {world}: {error}; possible sizes: {', '.join(fits)}") from None


def _divides(config: DecoderConfig, world: int) -> bool:
    """Whether every layer divides evenly."""
    kv = config.num_kv_heads
    return not (config.num_heads % world or config.intermediate_size % world or (kv % world and world % kv))
