"""What `adapter_config.json` says, as Hugging Face's PEFT writes it. No torch.

What is not implemented is refused by the name of its field: a field that is ignored would change the adapter's answers.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.engine.config import ConfigError
from penstock.engine.loading.json_files import read_object

CONFIG_FILE: Final = "adapter_config.json"

MODULES: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
"""What an adapter may be on; the last two where a family's checkpoint holds them as one."""

# Each changes what the two factors mean, or brings weights beside them.
_UNSUPPORTED: Final = (
    "use_dora",
    "modules_to_save",
    "fan_in_fan_out",
    "lora_bias",
    "layer_replication",
    "megatron_config",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "lora_ga_config",
)
# These begin by taking something out of the base model's weights, which are not the checkpoint's any more then.
_CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq")


class PeftConfig(msgspec.Struct, frozen=True):
    """Rank and scale of a LoRA adapter."""

    rank: int
    alpha: float
    rank_stabilised: bool
    """Scaled by α / √r (Kalajdzievski, 2023), not by α / r."""
    alphas: dict[str, float]
    """Of modules that have their own, by pattern."""

    def scale(self, module: str, rank: int) -> float:
        """What B · A of a module is multiplied by; `module` as in `model.layers.0.self_attn.q_proj`, `rank` is its own."""
        alpha = next((alpha for pattern, alpha in self.alphas.items() if _matches(pattern, module)), self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


def read_peft_config(path: Path) -> PeftConfig:
    """Reads the configuration of an adapter's folder.

    Raises:
        ConfigError: It is missing, is no LoRA, or asks for something that is not implemented; the message names it.
    """
    file = path / CONFIG_FILE
    if not file.is_file():
        raise ConfigError(f"{path} has no {CONFIG_FILE}: it is no adapter in PEFT's format")
    raw = read_object(file)
    _refuse_unsupported(raw)
    rank, alphas = raw.get("r"), raw.get("alpha_pattern") or {}
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"{CONFIG_FILE}: r must be a positive whole number, not {rank!r}")
    if not isinstance(alphas, dict):
        raise ConfigError(f"{CONFIG_FILE}: alpha_pattern must be an object, not {alphas!r}")
    own = {pattern: _alpha("alpha_pattern", alpha) for pattern, alpha in alphas.items()}
    return PeftConfig(rank, _alpha("lora_alpha", raw.get("lora_alpha")), bool(raw.get("use_rslora")), own)


def _alpha(field: str, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise ConfigError(f"{CONFIG_FILE}: {field} must be a number, not {given!r}")
    return float(given)


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if (kind := raw.get("peft_type")) != "LORA":
        raise ConfigError(f"{CONFIG_FILE}: peft_type is {kind!r}, and only LORA is supported")
    for field in _UNSUPPORTED:
        if raw.get(field):
            raise ConfigError(f"{CONFIG_FILE}: {field} is {raw[field]!r}, which is not supported")
    if (bias := raw.get("bias", "none")) != "none":
        raise ConfigError(f"{CONFIG_FILE}: bias is {bias!r}, and only 'none' is supported")
    start = raw.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise ConfigError(
            f"{CONFIG_FILE}: init_lora_weights is {start!r}, which changes the base model: convert it to plain LoRA"
        )
    targets = raw.get("target_modules")
    if isinstance(targets, list):
        others = sorted({str(name).rpartition(".")[2] for name in targets} - set(MODULES))
        if others:
            raise ConfigError(f"{CONFIG_FILE}: target_modules has {', '.join(others)} (supported: {', '.join(MODULES)})")


def _matches(pattern: str, module: str) -> bool:
    """As PEFT matches the keys of its patterns: the end of the name."""
    return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
