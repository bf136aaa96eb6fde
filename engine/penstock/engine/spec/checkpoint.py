"""The checkpoint of a draft model. No torch: the frontend checks it too."""

import logging
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from penstock.engine.config import ConfigError, ModelConfig, SpeculativeConfig
from penstock.engine.loading.checkpoint import weight_files
from penstock.engine.loading.json_files import read_object
from penstock.engine.models.config import DecoderConfig, parse_decoder_config

log = logging.getLogger(__name__)

_FLAG = "--speculative-config: model"


class DraftCheckpoint(NamedTuple):
    """A draft model and its shape."""

    path: Path
    """Local folder in Hugging Face format."""
    architecture: str
    config: DecoderConfig

    @classmethod
    def read(cls, speculative: SpeculativeConfig | None) -> "DraftCheckpoint | None":
        """The draft model's; None: drafts come from elsewhere. Raises ConfigError where it cannot be served."""
        if speculative is None or speculative.model is None:
            return None
        path = speculative.model
        if not (path / "config.json").is_file():
            raise ConfigError(f"{_FLAG} {path} has no config.json: it is not a model in Hugging Face's format")
        raw = read_object(path / "config.json")
        try:
            return cls(path, str((raw.get("architectures") or [""])[0]), parse_decoder_config(raw))
        except ConfigError as error:
            raise ConfigError(f"{_FLAG} {path}: {error}") from None


def check_draft_model(draft: DraftCheckpoint, target: ModelConfig) -> None:
    """Checks that a draft model fits a model.

    Raises:
        ConfigError: It has no weights, or another vocabulary.
    """
    if target.load_format != "dummy":
        weight_files(draft.path)
    if draft.config.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{_FLAG} {draft.path}: vocab_size is {draft.config.vocab_size:,}, and the model's is {target.vocab_size:,}; "
            "a draft model needs the model's tokenizer"
        )
    _compare_tokens(draft.path, target.tokenizer or target.path)
    if draft.config.max_position_embeddings < target.max_model_len:
        log.warning(
            "the draft model %s is made for %d tokens and the model serves %d: drafts beyond are likely to be rejected",
            draft.path,
            draft.config.max_position_embeddings,
            target.max_model_len,
        )


def _compare_tokens(draft: Path, target: Path) -> None:
    """Raises ConfigError where a token has another id in one of the two tokenizers."""
    ours, theirs = _tokens(draft), _tokens(target)
    if ours is None or theirs is None:
        missing = draft if ours is None else target
        log.warning("%s has no tokenizer.json: nobody has compared the tokens of the draft model with the model's", missing)
    elif ours != theirs:
        token = min(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
        raise ConfigError(
            f"{_FLAG} {draft}: token {token!r} has the id {ours.get(token)} in its tokenizer and {theirs.get(token)} in the "
            "model's; a draft model needs the model's tokenizer"
        )


def _tokens(folder: Path) -> dict[str, int] | None:
    file = folder / "tokenizer.json"
    return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True) if file.is_file() else None
