"""The numbers of ranks among which a model can be divided. Light to import."""

from typing import Final

from penstock.engine.config import ConfigError, EplbConfig
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.layers.shard import Shard, Stage
from penstock.engine.models.registry import family, full_name

_FAMILIES: Final = (
    *("Cohere", "Cohere2", "Ernie4_5", "Exaone4", "Gemma", "Gemma2", "Gemma3", "Glm", "Glm4", "Granite", "Llama", "Ministral"),
    *("Mistral", "Olmo2", "Olmo3", "Phi3", "Qwen2", "Qwen3", "SeedOss", "SmolLM3", "Starcoder2"),
    *("DeepseekV2", "DeepseekV3", "Glm4Moe", "GptOss", "KimiK2", "Mixtral", "Qwen2Moe", "Qwen3Moe"),
)
DIVIDED: Final = frozenset(f"{family}ForCausalLM" for family in _FAMILIES) | {
    "Gemma3ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
}
"""Architectures whose every layer is known to give the same on several ranks as on one."""


def check_sizes(architecture: str, config: DecoderConfig, world: int, *, whole_experts: bool = False) -> None:
    """ConfigError, with the arithmetic, where a layer cannot be divided among so many ranks; `whole_experts` are not. The
    vocabulary always can be: it is padded."""
    if full_name(architecture) not in DIVIDED:
        known = ", ".join(sorted(DIVIDED))
        raise ConfigError(f"--tensor-parallel-size {world}: {architecture} is not divided among ranks so far (divided: {known})")
    if (problem := size_problem(config, world, whole_experts=whole_experts)) is not None:
        sizes = range(1, config.num_heads + 1)
        fits = [str(size) for size in sizes if size_problem(config, size, whole_experts=whole_experts) is None]
        raise ConfigError(f"--tensor-parallel-size {world}: {problem}; possible sizes: {', '.join(fits)}")


def check_stages(config: DecoderConfig, stages: int) -> None:
    """ConfigError where the layers cannot be distributed among so many pipeline stages."""
    flag = f"--pipeline-parallel-size {stages}"
    try:
        Stage(0, stages).layers([1.0] * config.num_layers)  # their number alone decides
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


def check_experts(architecture: str, config: DecoderConfig, ranks: int, eplb: EplbConfig | None = None) -> None:
    """ConfigError where there are no experts, or fewer than ranks, or where those that move could not be distributed evenly."""
    if config.experts is None:
        raise ConfigError(f"--enable-expert-parallel: {architecture} has no experts")
    if family(architecture).reads_images:
        raise ConfigError(f"--enable-expert-parallel: {architecture} reads images, which no ranks with experts do so far")
    if config.experts.count < ranks:
        raise ConfigError(f"--enable-expert-parallel: {config.experts.count} experts are fewer than the {ranks} ranks")
    if eplb is not None:
        _check_slots(config.experts.count, eplb.num_redundant_experts, ranks)


def _check_slots(experts: int, redundant: int, ranks: int) -> None:
    """ConfigError where ranks cannot have equally many slots, or a rank would have an expert twice at any rate."""
    whole = f"{experts} experts + num_redundant_experts {redundant}"
    if (experts + redundant) % ranks:
        numbers = range(-experts % ranks, experts * (ranks - 1) + 1, ranks)
        fits = ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")
        raise ConfigError(f"--enable-eplb: {whole} cannot be divided among {ranks} ranks; possible numbers: {fits}")
    if redundant > experts * (ranks - 1):
        raise ConfigError(f"--enable-eplb: {whole} are more than a copy of each expert on each of {ranks} ranks")


def size_problem(config: DecoderConfig, world: int, *, whole_experts: bool = False) -> str | None:
    """Say which size does not divide evenly among so many ranks; None: all do. `whole_experts` are not divided."""
    shard, experts = Shard(0, world), config.experts
    try:
        shard.span(config.num_heads, "num_attention_heads")
        shard.kv_heads(config.num_kv_heads)
        if experts is None or not all(experts.layers):
            shard.span(config.intermediate_size, "intermediate_size")
        if experts is not None:
            if not whole_experts:
                shard.span(experts.intermediate_size, "moe_intermediate_size")
            shard.span(experts.shared_size, "the intermediate size of the shared expert,")
    except ValueError as error:
        return str(error)
    return None
