"""The checkpoint of a draft model or a head. No torch: the frontend checks it too."""

import logging
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from penstock.engine.config import ConfigError, DType, ModelConfig, SpeculativeConfig
from penstock.engine.loading.checkpoint import tensor_dtypes
from penstock.engine.loading.images import read_image_settings
from penstock.engine.loading.json_files import read_object
from penstock.engine.models.config import DecoderConfig, parse_decoder_config
from penstock.engine.models.cost import draft_bytes, held_draft_bytes, model_cost
from penstock.engine.models.head_config import SPECULATORS, HeadConfig, head_kind, parse_head_config, parse_mtp_config
from penstock.engine.models.vision.cost import tower_cost
from penstock.engine.multimodal.settings import ImageSettings
from penstock.prompt.image_size import TowerCost

log = logging.getLogger(__name__)

_FLAG = "--speculative-config: model"


class DraftCheckpoint(NamedTuple):
    """A draft model or a head, and its shape."""

    path: Path
    """Local folder in Hugging Face format."""
    architecture: str
    config: DecoderConfig
    """Of its layers."""
    head: HeadConfig | None
    """None: a draft model."""
    images: ImageSettings | None = None
    """Of a draft model that reads images with a tower of its own; None: it reads placeholders in their places."""

    @property
    def in_target(self) -> bool:
        """Whether the weights are in the target's checkpoint, and change with it."""
        return self.head is not None and self.head.kind == "mtp"

    def step_bytes(self, speculative: SpeculativeConfig | None, dtype: DType, ranks: int) -> float:
        """Bytes of weights that the drafts of a step read, to be added to those of whole layers.

        Each rank has a part of a layer, and all of what drafts.
        """
        vocab_size = self.config.vocab_size if self.head is None else self.head.draft_vocab_size
        times = 0 if speculative is None else speculative.num_speculative_tokens * ranks
        return times * draft_bytes(self.config, dtype, vocab_size)

    def held_bytes(self, target: ModelConfig) -> int:
        """Bytes of its weights, but for norms and biases, beside a target."""
        return held_draft_bytes(self.config, self.head, target.dtype, target.stored_quantization if self.in_target else None)

    def tower_cost(self, target: ModelConfig) -> TowerCost:
        """What both towers take for an image, in tokens of text that take both models as long."""
        assert target.images is not None and self.config.vision is not None and target.cost is not None, "both have towers"
        ours = model_cost(self.config, target.dtype, target.kv_dtype or target.dtype).linear_flops_per_token
        theirs = target.cost.linear_flops_per_token
        first, second = target.images.cost, tower_cost(self.config.vision, ours)
        part = ours / (ours + theirs)
        return TowerCost(
            first.linear + part * (second.linear - first.linear), first.quadratic + part * (second.quadratic - first.quadratic)
        )

    @classmethod
    def read(cls, speculative: SpeculativeConfig | None, target: ModelConfig) -> "DraftCheckpoint | None":
        """What `speculative` names; None: drafts come from elsewhere.

        Raises:
            ConfigError: It cannot be served, or is not what the method says.
        """
        if speculative is not None and speculative.method == "mtp":
            return cls._in(target)
        if speculative is None or speculative.model is None:
            return None
        path, method = speculative.model, speculative.method
        if not (path / "config.json").is_file():
            raise ConfigError(f"{_FLAG} {path} has no config.json: it is not a model in Hugging Face's format")
        raw, tensors = read_object(path / "config.json"), set[str]()
        try:
            if raw.get("quantization_config") is not None:
                raise ConfigError("config.json: quantization_config is set, and quantized drafters are not supported")
            if target.load_format != "dummy" or method != "draft_model":
                tensors = set(tensor_dtypes(path))
            kind = head_kind(tensors) or "draft_model"
            if method != kind:
                raise ConfigError(f"the checkpoint is one for the method {kind}, not for {method}")
            if kind == "draft_model":
                config = parse_decoder_config(raw)
                images = None if target.images is None else read_image_settings(path, config.vision, {})
                return cls(path, str((raw.get("architectures") or [""])[0]), config, None, images)
            head = parse_head_config(raw, tensors, parse_decoder_config(read_object(target.path / "config.json")))
            return cls(path, kind, head.decoder, head)
        except ConfigError as error:
            raise ConfigError(f"{_FLAG} {path}: {error}") from None

    @classmethod
    def _in(cls, target: ModelConfig) -> "DraftCheckpoint":
        head = mtp_head(target)
        if head is None:
            raise ConfigError(
                f"--speculative-config: the method mtp needs a checkpoint with an MTP layer, and {target.path} has none: "
                "num_nextn_predict_layers in config.json, and enorm.weight in the layer after the last"
            )
        return cls(target.path, head.kind, head.decoder, head)


def mtp_head(target: ModelConfig) -> HeadConfig | None:
    """The MTP layer of a model's checkpoint; None: it has none."""
    tensors = None if target.load_format == "dummy" else set(tensor_dtypes(target.path))
    return parse_mtp_config(read_object(target.path / "config.json"), tensors)


def verifier(folder: Path) -> str | None:
    """The model that a head in speculators' format drafts for; None: the folder has another format.

    Raises:
        ConfigError: The head does not name it.
    """
    config = folder / "config.json"
    raw = read_object(config) if config.is_file() else {}
    if SPECULATORS not in raw:
        return None
    found = ((raw.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")
    if not found:
        raise ConfigError(f"{config}: speculators_config.verifier.name_or_path is missing, the model that the head drafts for")
    return str(found)


def check_drafter(draft: DraftCheckpoint, target: ModelConfig) -> None:
    """Checks that a draft model or a head fits a model.

    Raises:
        ConfigError: It has another vocabulary, takes positions that a head cannot have, or reads images in another way.
    """
    if draft.config.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{_FLAG} {draft.path}: vocab_size is {draft.config.vocab_size:,}, and the model's is {target.vocab_size:,}; "
            "drafts need the model's tokenizer"
        )
    if draft.head is not None:
        _check_positions(draft, target)
        return
    _compare_tokens(draft.path, target.tokenizer or target.path)
    _check_images(draft, target)
    if draft.config.max_position_embeddings < target.max_model_len:
        log.warning(
            "the draft model %s is made for %d tokens and the model serves %d: drafts beyond are likely to be rejected",
            draft.path,
            draft.config.max_position_embeddings,
            target.max_model_len,
        )


def _check_positions(draft: DraftCheckpoint, target: ModelConfig) -> None:
    """Raises ConfigError for a head that was trained on positions in rows and columns: a head has the numbers of the tokens."""
    if target.images is not None and any(rope.sections for rope in draft.config.ropes):
        raise ConfigError(
            f"{_FLAG} {draft.path}: this head takes the positions of images in rows and columns (mrope_section), which heads do "
            "not have so far (--limit-mm-per-prompt '{\"image\": 0}')"
        )


def _check_images(draft: DraftCheckpoint, target: ModelConfig) -> None:
    """Raises ConfigError for a draft model whose tower makes other embeddings than there are placeholders in prompts."""
    if target.images is None:
        return
    if draft.images is None:
        log.info("the draft model %s reads placeholders in the places of images: fewer drafts are accepted there", draft.path)
    elif not draft.images.takes_places_of(target.images):
        raise ConfigError(
            f"{_FLAG} {draft.path}: it reads images in another way than the model, with other placeholders or another number of "
            "embeddings; drafts need a model of the same family (--limit-mm-per-prompt '{\"image\": 0}')"
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
            "model's; drafts need the model's tokenizer"
        )


def _tokens(folder: Path) -> dict[str, int] | None:
    file = folder / "tokenizer.json"
    return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True) if file.is_file() else None
