"""How a checkpoint wants its images: preprocessor_config.json. No torch: the frontend reads it too."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from penstock.engine.config import ConfigError
from penstock.engine.loading.json_files import read_object
from penstock.engine.models.vision.config import (
    Gemma3Config,
    LlavaNextConfig,
    PatchConfig,
    SquareConfig,
    VisionConfig,
)
from penstock.engine.multimodal.settings import ImageSettings

_PROCESSOR: Final = "processor_config.json"
"""File in which transformers 5 saves the same."""

_OVERRIDES: Final = ("min_pixels", "max_pixels")

_log = logging.getLogger(__name__)


def read_image_settings(path: Path, vision: VisionConfig | None, overrides: Mapping[str, Any]) -> ImageSettings | None:
    """What becomes of images; None: the model, or its folder, is for text alone.

    Args:
        path: The checkpoint's folder.
        vision: Of its config.json.
        overrides: Fields that win over the file's.

    Raises:
        ConfigError: The file asks for what is not supported; the message names the field.
    """
    known = _OVERRIDES if isinstance(vision, PatchConfig) else ()
    if others := sorted(overrides.keys() - set(known)):
        takes = f"this model takes {' and '.join(known)}" if known else "this model takes none"
        raise ConfigError(f"--mm-processor-kwargs: {', '.join(others)}: {takes}")
    if vision is None:
        return None
    # They import numpy and pillow, which models for text alone do without.
    from penstock.engine.multimodal.clip import MEAN, STD, read_clip
    from penstock.engine.multimodal.normalization import FILE, read_normalization
    from penstock.engine.multimodal.resize import SIGLIP_MEAN, SIGLIP_STD, read_patches, read_square
    from penstock.engine.multimodal.tiles import read_tiles

    raw = _image_processor(path, FILE)
    if raw is None:
        _log.warning("%s has neither %s nor %s: images are refused", path, FILE, _PROCESSOR)
        return None
    if isinstance(vision, PatchConfig):
        patches = read_patches(raw | dict(overrides), vision.tower)
        return ImageSettings(
            token_id=vision.image_token_id,
            tokens=patches.size.max_pixels // patches.size.factor**2,
            normalization=read_normalization(raw, MEAN, STD),
            resize=patches,
        )
    assert isinstance(vision, SquareConfig)
    size = vision.tower.image_size
    if isinstance(vision, Gemma3Config):
        return ImageSettings(
            token_id=vision.image_token_id,
            begin_id=vision.begin_token_id,
            end_id=vision.end_token_id,
            tokens=vision.tokens_per_image,
            two_way=True,
            normalization=read_normalization(raw, SIGLIP_MEAN, SIGLIP_STD),
            resize=read_square(raw, size),
        )
    tiles = read_tiles(raw, vision) if isinstance(vision, LlavaNextConfig) else None
    return ImageSettings(
        token_id=vision.image_token_id,
        tokens=vision.tokens_per_image if tiles is None else tiles.size.most_tokens,
        normalization=read_normalization(raw, MEAN, STD),
        resize=read_clip(raw, size) if tiles is None else tiles,
    )


def _image_processor(path: Path, name: str) -> dict[str, Any] | None:
    if (path / name).is_file():
        return read_object(path / name)
    found = read_object(path / _PROCESSOR).get("image_processor") if (path / _PROCESSOR).is_file() else None
    return found if isinstance(found, dict) else None
