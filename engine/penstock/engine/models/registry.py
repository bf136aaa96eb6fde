"""Which class serves which architecture. Names alone, so that the frontend can tell what is known without torch."""

from importlib import import_module
from typing import Any

from penstock.engine.config import ConfigError

ARCHITECTURES = {
    "LlamaForCausalLM": "penstock.engine.models.llama:LlamaForCausalLM",
    "Qwen3ForCausalLM": "penstock.engine.models.qwen3:Qwen3ForCausalLM",
}


def check_architecture(architecture: str) -> None:
    """Raises ConfigError, with the known ones, where nothing here serves the architecture."""
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"architecture {architecture!r} is not supported (supported: {', '.join(sorted(ARCHITECTURES))})")


def model_class(architecture: str) -> Any:
    """Imports the class that serves the architecture; ConfigError where there is none."""
    check_architecture(architecture)
    module, _, name = ARCHITECTURES[architecture].partition(":")
    return getattr(import_module(module), name)
