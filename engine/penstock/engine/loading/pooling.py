"""How a checkpoint makes embeddings: sentence-transformers' `modules.json` and what it names. No torch: the frontend reads it
too."""

from pathlib import Path
from typing import Any

import msgspec

from penstock.engine.config import ConfigError, PooledTokens, PoolingConfig, RunnerType
from penstock.engine.loading.json_files import read_json, read_object
from penstock.engine.models.registry import has_lm_head

MODULES = "modules.json"
LENGTHS = "sentence_bert_config.json"
POOLED: dict[str, PooledTokens] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
}
"""The flags of `1_Pooling/config.json` that are supported; each of the others is a kind of pooling too."""


class _Module(msgspec.Struct, frozen=True):
    type: str
    path: str = ""

    @property
    def kind(self) -> str:
        """`Transformer` of `sentence_transformers.models.Transformer`."""
        return self.type.rpartition(".")[2]


def read_pooling(path: Path, raw: dict[str, Any], hidden_size: int, runner: RunnerType) -> PoolingConfig | None:
    """How a model pools; None: it generates.

    Args:
        path: The checkpoint's folder.
        raw: Its config.json.
        hidden_size: Of the model.
        runner: `auto`: it embeds if the folder is sentence-transformers', or the model has no LM head.

    Raises:
        ConfigError: It is to do what it cannot, or asks for what is not supported; the message names it.
    """
    architecture = raw["architectures"][0]
    embeds = (path / MODULES).is_file() or not has_lm_head(architecture)
    if runner == "generate" and not has_lm_head(architecture):
        raise ConfigError(f"--runner generate: {architecture} has no LM head, and can embed alone (--runner pooling)")
    if runner == "generate" or (runner == "auto" and not embeds):
        return None
    # What vLLM does to decoders where nothing is said.
    tokens, normalize = ("last", True) if not (path / MODULES).is_file() else _read_modules(path, hidden_size)
    return PoolingConfig(tokens=tokens, normalize=normalize, size=hidden_size, dimensions=_dimensions(raw, hidden_size))


def read_max_length(path: Path) -> int | None:
    """Up to how many tokens sentence-transformers reads of a text; None: no file says so.

    Raises:
        ConfigError: The file says what is no length, or asks for lower case, which the tokenizer alone can do here.
    """
    file = path / LENGTHS
    if not file.is_file():
        return None
    raw = read_object(file)
    if raw.get("do_lower_case"):
        raise ConfigError(f"{file}: do_lower_case is set, and not supported: tokenizer.json has to have a normalizer for it")
    length = raw.get("max_seq_length")
    if length is not None and not (type(length) is int and length >= 2):
        raise ConfigError(f"{file}: max_seq_length must be a whole number from 2 on, not {length!r}")
    return length


def _read_modules(path: Path, hidden_size: int) -> tuple[PooledTokens, bool]:
    """Return which tokens are pooled, and whether the result is normalised."""
    modules = read_json(path / MODULES, list[_Module])
    kinds = [module.kind for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConfigError(
            f"{path / MODULES}: the modules are {', '.join(kinds) or 'none'}; supported are Transformer, Pooling and at most "
            "Normalize after them"
        )
    if modules[0].path:
        raise ConfigError(f"{path / MODULES}: the Transformer is in {modules[0].path!r}, and only the folder itself is supported")
    return _read_tokens(path / modules[1].path / "config.json", hidden_size), kinds[-1] == "Normalize"


def _read_tokens(file: Path, hidden_size: int) -> PooledTokens:
    raw = read_object(file)
    modes = [name for name, value in raw.items() if name.startswith("pooling_mode_") and value]
    if len(modes) != 1 or modes[0] not in POOLED:
        raise ConfigError(f"{file}: the pooling is {' with '.join(modes) or 'none'}; supported is one of {', '.join(POOLED)}")
    if raw.get("include_prompt") is False:
        raise ConfigError(f"{file}: include_prompt is false, and a part of the text cannot be left out")
    if (size := raw.get("word_embedding_dimension", hidden_size)) != hidden_size:
        raise ConfigError(f"{file}: word_embedding_dimension is {size}, and the model's hidden_size {hidden_size}")
    return POOLED[modes[0]]


def _dimensions(raw: dict[str, Any], hidden_size: int) -> tuple[int, ...] | None:
    """Return the sizes to which config.json says that embeddings may be cut."""
    given = raw.get("matryoshka_dimensions")
    if given is None:
        return () if raw.get("is_matryoshka") else None
    if not isinstance(given, list) or not all(type(size) is int and 0 < size <= hidden_size for size in given):
        raise ConfigError(f"config.json: matryoshka_dimensions must be whole numbers from 1 to {hidden_size}, not {given!r}")
    return tuple(given) or None
