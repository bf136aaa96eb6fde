"""CLIP's image processor: the shorter side to a fixed length, then a square from the middle."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from PIL import Image

from penstock.engine.config import ConfigError
from penstock.engine.multimodal.normalization import FILE
from penstock.engine.multimodal.pixels import Pixels
from penstock.engine.multimodal.settings import ClipSettings

MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
STD: Final = (0.26862954, 0.26130258, 0.27577711)
_BICUBIC: Final = 3


def clip_pixels(image: Image.Image, settings: ClipSettings) -> Pixels:
    """The square; equal to transformers' processor, which normalises it too."""
    width, height = image.size
    short = min(width, height)
    width, height = int(settings.shortest_edge * width / short), int(settings.shortest_edge * height / short)
    resized = image.resize((width, height), Image.Resampling(settings.resample))
    size = settings.size
    left, top = (width - size) // 2, (height - size) // 2
    return Pixels.of(np.asarray(resized.crop((left, top, left + size, top + size))))


def read_clip(raw: Mapping[str, Any], size: int) -> ClipSettings:
    """Reads the object of `FILE`.

    Args:
        raw: It.
        size: The side of the tower's square, by config.json.

    Raises:
        ConfigError: It asks for what is not supported, or for another size; the message names the field.
    """
    for field in ("do_resize", "do_center_crop"):
        if raw.get(field) is False:
            raise ConfigError(f"{FILE}: {field} is false, and images of any size are not supported by this model's tower")
    if raw.get("do_pad"):
        raise ConfigError(f"{FILE}: do_pad is not supported for this model")
    crop, edge = raw.get("crop_size") or size, raw.get("size") or size
    if isinstance(crop, Mapping):
        crop = crop.get("height") if crop.get("height") == crop.get("width") else None
    if isinstance(edge, Mapping):
        edge = edge.get("shortest_edge")
    if crop != size or not isinstance(edge, int) or edge < size:
        raise ConfigError(
            f"{FILE}: size {raw.get('size')} and crop_size {raw.get('crop_size')} do not give the tower's {size} x {size} pixels"
        )
    return ClipSettings(size=size, shortest_edge=edge, resample=int(raw.get("resample", _BICUBIC)))
