"""How a checkpoint wants its images: preprocessor_config.json. No torch: the frontend reads it too."""

import logging
from pathlib import Path
from typing import Any, Final

from penstock.engine.loading.json_files import read_object
from penstock.engine.models.vision.config import VisionConfig
from penstock.engine.multimodal.settings import ImageSettings

_PROCESSOR: Final = "processor_config.json"
"""Where transformers 5 saves the same."""

_log = logging.getLogger(__name__)


def read_image_settings(path: Path, vision: VisionConfig | None) -> ImageSettings | None:
    """What becomes of images; None: the model, or its folder, is for text alone.

    Args:
        path: The checkpoint's folder.
        vision: Of its config.json.

    Raises:
        ConfigError: The file asks for what is not supported; the message names the field.
    """
    if vision is None:
        return None
    # They import numpy and pillow, which models for text alone do without.
    from penstock.engine.multimodal.clip import MEAN, STD, read_clip
    from penstock.engine.multimodal.normalization import FILE, read_normalization

    raw = _image_processor(path, FILE)
    if raw is None:
        _log.warning("%s has neither %s nor %s: images are refused", path, FILE, _PROCESSOR)
        return None
    return ImageSettings(
        token_id=vision.image_token_id,
        tokens=vision.tokens_per_image,
        normalization=read_normalization(raw, MEAN, STD),
        clip=read_clip(raw, vision.tower.image_size),
    )


def _image_processor(path: Path, name: str) -> dict[str, Any] | None:
    if (path / name).is_file():
        return read_object(path / name)
    found = read_object(path / _PROCESSOR).get("image_processor") if (path / _PROCESSOR).is_file() else None
    return found if isinstance(found, dict) else None
