"""Speculative decoding as people ask for it: `--speculative-config` with vLLM's keys, or `--spec-method` and `--spec-tokens`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import msgspec

from penstock.engine.config import ConfigError, DraftSampleMethod, ModelConfig, SpeculativeConfig, SpeculativeMethod
from penstock.engine.loading.checkpoint import resolve, tensor_dtypes
from penstock.engine.loading.json_files import read_object
from penstock.engine.models.head_config import head_kind, proposed_tokens
from penstock.engine.spec.checkpoint import mtp_head
from penstock.plain_errors import explained
from penstock.suggest import suggestion

NUM_TOKENS: Final = 4
"""Drafts of a request in a step at most, where nobody says."""
LOOKUP: Final = (3, 5)
"""Fewest and most tokens that are compared, where nobody says."""
_METHODS: Final = get_args(SpeculativeMethod)
_NOT_SERVED: Final = ("medusa", "mlp_speculator", "dflash", "dspark")
_ALIASES: Final = {"deepseek_mtp": "mtp"}
_MODELS: Final = ("draft_model", "eagle", "eagle3")
"""Methods that need a checkpoint."""
_PREFIXES: Final = {"ngram": "prompt_lookup_", "suffix": "suffix_decoding_"}
LOOKUPS: Final = tuple(_PREFIXES)
"""Methods that look drafts up in text."""

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class SpeculativeArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `--speculative-config`."""

    method: str | None = None
    model: str | None = None
    revision: str | None = None
    draft_sample_method: DraftSampleMethod | None = None
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=32)] | None = None
    prompt_lookup_min: Annotated[int, msgspec.Meta(ge=1)] | None = None
    prompt_lookup_max: Annotated[int, msgspec.Meta(ge=1)] | None = None
    suffix_decoding_max_tree_depth: Annotated[int, msgspec.Meta(ge=1)] | None = None
    suffix_decoding_max_cached_requests: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] | None = None
    suffix_decoding_max_spec_factor: Annotated[float, msgspec.Meta(gt=0)] | None = None
    suffix_decoding_min_token_prob: Share | None = None


def speculative_config(
    config: Mapping[str, Any] | None,
    method: str | None,
    tokens: int | None,
    model: str | None = None,
    target: ModelConfig | None = None,
) -> SpeculativeConfig | None:
    """The typed form of the four flags; None where none of them is given. A draft model is looked for, and downloaded.

    Args:
        config: `--speculative-config`.
        method: `--spec-method`.
        tokens: `--spec-tokens`.
        model: `--spec-model`.
        target: The model that is served, which may have an MTP layer.

    Raises:
        ConfigError: An unknown key, a wrong value, a contradiction, or a method that there is not; it names the flag and the key.
    """
    if not config and method is None and tokens is None and model is None:
        return None
    args = _parsed(dict(config or {}))
    for flag, key, given in _flags(method, tokens, model):
        if given is not None and getattr(args, key) is not None:
            raise ConfigError(f"{flag} and {key} in --speculative-config exclude each other; remove one")
    source, tokens = args.model or model, args.num_speculative_tokens or tokens
    named = _named(args.method or method, has_model=source is not None)
    folder = None if source is None else resolve(source, args.revision, what="draft model")
    chosen = named or _method(args.method or method, folder, target)
    lookup = _lookup(args.prompt_lookup_min, args.prompt_lookup_max)
    fields = {name: value for name, value in msgspec.structs.asdict(args).items() if value is not None}
    for name in fields:
        for other, prefix in _PREFIXES.items():
            if name.startswith(prefix) and other != chosen:
                raise ConfigError(f"--speculative-config: {name} is for the method {other}, not for {chosen}; remove it")
    if args.draft_sample_method == "probabilistic" and chosen in _PREFIXES:
        raise ConfigError(
            f"--speculative-config: draft_sample_method probabilistic: the method {chosen} draws no drafts; remove it"
        )
    for name in ("method", "model", "revision"):
        fields.pop(name, None)
    fields |= {
        "num_speculative_tokens": tokens or _proposed(folder) or NUM_TOKENS,
        "model": folder,
        "prompt_lookup_min": lookup[0],
        "prompt_lookup_max": lookup[1],
    }
    return SpeculativeConfig(method=chosen, **fields)


def _flags(method: str | None, tokens: int | None, model: str | None) -> list[tuple[str, str, Any]]:
    """Each flag, the key of `--speculative-config` that says the same, and its value."""
    return [
        ("--spec-method", "method", method),
        ("--spec-tokens", "num_speculative_tokens", tokens),
        ("--spec-model", "model", model),
    ]


def _parsed(config: dict[str, Any]) -> SpeculativeArgs:
    try:
        return msgspec.convert(config, SpeculativeArgs)
    except msgspec.ValidationError as error:
        wrong = explained(error, SpeculativeArgs)
        raise ConfigError(f"--speculative-config: {wrong.field}: {wrong.problem}") from None


def _proposed(folder: Path | None) -> int | None:
    """Drafts in a step that a checkpoint proposes."""
    config = None if folder is None else folder / "config.json"
    return proposed_tokens(read_object(config)) if config is not None and config.is_file() else None


def _named(method: str | None, *, has_model: bool) -> SpeculativeMethod | None:
    """The method by its name, before anything is looked for; None: the checkpoints tell."""
    method = _ALIASES.get(method or "", method)
    if method in _NOT_SERVED:
        raise ConfigError(f"--speculative-config: the method {method} is not served yet; use {', '.join(_METHODS)}")
    if method in (None, "auto"):
        return None
    for known in _METHODS:
        if method == known:
            if known not in _MODELS and has_model:
                raise ConfigError(f"--speculative-config: model is for {', '.join(_MODELS)}, not for {known}; remove it")
            if known in _MODELS and not has_model:
                raise ConfigError(f"--speculative-config: the method {known} needs model, a folder or a name on the Hub")
            return known
    raise ConfigError(
        f"--speculative-config: there is no method {method!r} ({', '.join(_METHODS)}, auto){suggestion(method, _METHODS)}"
    )


def _method(method: str | None, model: Path | None, target: ModelConfig | None) -> SpeculativeMethod:
    """Where it has no name: as the checkpoints say."""
    if model is not None:
        return head_kind(set(tensor_dtypes(model))) or "draft_model"
    if target is not None and mtp_head(target) is not None:
        return "mtp"
    if method is None:
        raise ConfigError(f"--speculative-config: method is missing: {', '.join(_METHODS)} or auto")
    return "suffix"


def _lookup(least: int | None, most: int | None) -> tuple[int, int]:
    """As vLLM has it where one is given: the other equals it."""
    if least is None and most is None:
        return LOOKUP
    found = (most if least is None else least, least if most is None else most)
    assert found[0] is not None and found[1] is not None
    if found[0] > found[1]:
        raise ConfigError(f"--speculative-config: prompt_lookup_min {found[0]} is above prompt_lookup_max {found[1]}")
    return found[0], found[1]
