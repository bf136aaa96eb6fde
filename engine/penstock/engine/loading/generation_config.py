"""generation_config.json: how a model's authors would have it sampled, and what ends its answers. No torch: the frontend reads
it too."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.engine.config import ConfigError, GenerationDefaults
from penstock.engine.loading.json_files import read_json
from penstock.engine.sampling import MinP, RepetitionPenalty, Temperature, TokenCount, TopK, TopP
from penstock.plain_errors import explained
from penstock.suggest import suggestion

FILE: Final = "generation_config.json"
_OVERRIDE: Final = "--override-generation-config"

_log = logging.getLogger(__name__)


class _Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """What of the file is used for sampling; Hugging Face's other fields are not."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    max_new_tokens: TokenCount | None = None


class _Ends(msgspec.Struct, frozen=True):
    eos_token_id: int | tuple[int, ...] | None = None


def read_defaults(checkpoint: Path, source: str, override: Mapping[str, Any]) -> GenerationDefaults:
    """What requests get that leave sampling parameters out; the log says so where that is not OpenAI's.

    Args:
        checkpoint: The model's folder.
        source: `auto`: the checkpoint's file, if it has one; `vllm`: none; else a folder with such a file.
        override: Fields of such a file, which win; None takes one away.

    Raises:
        ConfigError: There is no such file, or a field has a value that no request could have.
    """
    files = [] if source == "vllm" else _files(checkpoint, source)[:1]
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for file in files:
        values = msgspec.to_builtins(read_json(file, _Sampling))
        origins = dict.fromkeys(values, str(file))
    own = _overridden(override)
    values = {name: value for name, value in (values | own).items() if value is not None}
    origins |= dict.fromkeys(own, _OVERRIDE)
    if values:
        told = ", ".join(f"{name} {value} ({origins[name]})" for name, value in values.items())
        _log.info("sampling where requests say nothing: %s; --generation-config vllm: as OpenAI has it", told)
    max_tokens: int | None = values.pop("max_new_tokens", None)
    # The authors' is a default; that of whoever runs the server is its limit too.
    limited = source not in ("auto", "vllm") or "max_new_tokens" in own
    return GenerationDefaults(**values, max_tokens=max_tokens, max_tokens_limit=max_tokens if limited else None)


def read_eos_token_ids(checkpoint: Path, source: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """What ends answers: by the file that `source` means, which chat models extend by their end-of-turn tokens, else by the
    checkpoint's own, else by its config.json.

    Args:
        checkpoint: The model's folder.
        source: As for `read_defaults`.
        config: config.json.
    """
    found = [read_json(file, _Ends).eos_token_id for file in _files(checkpoint, source)]
    ids = next((ids for ids in [*found, config.get("eos_token_id")] if ids is not None), ())
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _files(checkpoint: Path, source: str) -> list[Path]:
    """The file that was asked for, and the checkpoint's own, if there is one."""
    own = [checkpoint / FILE] if (checkpoint / FILE).is_file() else []
    if source in ("auto", "vllm"):
        return own
    asked = Path(source) / FILE
    if not asked.is_file():
        raise ConfigError(f"--generation-config {source}: there is no {asked}; expected is auto, vllm or a folder with that file")
    return [asked, *own]


def _overridden(override: Mapping[str, Any]) -> dict[str, Any]:
    fields = _Sampling.__struct_fields__
    for name in override:
        if name not in fields:
            known = f"it takes {', '.join(fields)}"
            raise ConfigError(f"{_OVERRIDE}: there is no {name!r}{suggestion(name, fields)} ({known})")
    try:
        msgspec.convert(override, _Sampling)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{_OVERRIDE}: {explained(error, _Sampling)}") from None
    return dict(override)
